//! The system calls that a confined program may not make, as a classic BPF program for seccomp.
//!
//! Invariant: what is refused fails with an error that the program can report; only a foreign architecture is killed. The list
//! holds what reaches beyond the process (network, other processes, memory that no limit counts, the kernel itself) and what
//! changes files that Landlock does not guard (modes, owners, times). Calls newer than the list are refused as unknown, and
//! with them the x32 numbers, so no second number of a call slips through; crates that assemble such filters compare single
//! numbers only and cannot say that.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, sock_filter,
};

/// What a program may do beside computing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allowed {
    /// Start processes; threads are always allowed.
    pub(super) processes: bool,
    /// Send signals, which is harmless where no other process can be seen.
    pub(super) signals: bool,
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// The last call that was considered, of Linux 6.18.
const LAST: u32 = 469;

/// Offsets in `struct seccomp_data`; both architectures are little-endian.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;

/// All flags of `clone` that make a namespace.
const NEW_NAMESPACES: u32 = 0x7e02_0000;

/// Refused always.
const REFUSED: &[c_long] = &[
    // Network; pairs of sockets within the program are looked at below.
    libc::SYS_socket,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // Memory that the limit of the address space does not count, or that outlives the program.
    libc::SYS_memfd_create,
    libc::SYS_memfd_secret,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_semget,
    libc::SYS_msgget,
    libc::SYS_mq_open,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // Ways around this filter, and parts of the kernel with a long history of holes.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_vmsplice,
    // Namespaces, mounts, roots.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    // The machine.
    libc::SYS_acct,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_load,
    libc::SYS_personality,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    // What Landlock leaves open on files of others.
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    // fchmodat2, setxattrat, removexattrat, open_tree_attr, file_setattr: newer than the names that we have.
    452,
    463,
    466,
    467,
    469,
];

/// Refused always, where the architecture has them.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[c_long] = &[
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_modify_ldt,
    libc::SYS_kexec_file_load,
];
#[cfg(target_arch = "aarch64")]
const REFUSED_HERE: &[c_long] = &[libc::SYS_kexec_file_load];

/// Calls that start a process, beside `clone`.
#[cfg(target_arch = "x86_64")]
const FORKS: &[c_long] = &[libc::SYS_fork, libc::SYS_vfork];
#[cfg(target_arch = "aarch64")]
const FORKS: &[c_long] = &[];

const SIGNALS: &[c_long] = &[
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
];

const DENY: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
const UNKNOWN: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

/// The filter, to be loaded as it is; never empty.
pub(super) fn program(allowed: Allowed) -> Vec<sock_filter> {
    let mut program = vec![
        load(ARCH),
        jump(BPF_JEQ, ARCHITECTURE, 1, 0),
        verdict(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
        jump(BPF_JGE, LAST + 1, 0, 1),
        verdict(UNKNOWN),
    ];
    let none: &[c_long] = &[];
    let forks = if allowed.processes { none } else { FORKS };
    let signals = if allowed.signals { none } else { SIGNALS };
    for call in [REFUSED, REFUSED_HERE, forks, signals].concat() {
        program.extend([jump(BPF_JEQ, number(call), 0, 1), verdict(DENY)]);
    }
    // Its flags are in memory, where a filter cannot look; C libraries fall back on `clone`.
    program.extend([jump(BPF_JEQ, number(libc::SYS_clone3), 0, 1), verdict(UNKNOWN)]);
    let thread = libc::CLONE_THREAD as u32;
    let threads_only =
        if allowed.processes { vec![] } else { vec![jump(BPF_JSET, thread, 1, 0), verdict(DENY)] };
    let namespaces = vec![jump(BPF_JSET, NEW_NAMESPACES, 0, 1), verdict(DENY)];
    look_into(&mut program, libc::SYS_clone, &[namespaces, threads_only].concat());
    let local = libc::AF_UNIX as u32;
    look_into(&mut program, libc::SYS_socketpair, &[jump(BPF_JEQ, local, 1, 0), verdict(DENY)]);
    // Limits of oneself only.
    look_into(&mut program, libc::SYS_prlimit64, &[jump(BPF_JEQ, 0, 1, 0), verdict(DENY)]);
    program.push(verdict(libc::SECCOMP_RET_ALLOW));
    program
}

/// The filter as `bwrap` reads it from a descriptor.
pub(super) fn bytes(program: &[sock_filter]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(program));
    for step in program {
        bytes.extend(step.code.to_ne_bytes());
        bytes.extend([step.jt, step.jf]);
        bytes.extend(step.k.to_ne_bytes());
    }
    bytes
}

/// `steps` see the low half of the first argument of `call`; if they come to no verdict, it is allowed.
fn look_into(program: &mut Vec<sock_filter>, call: c_long, steps: &[sock_filter]) {
    let skipped = u8::try_from(steps.len() + 2).expect("a few steps");
    program.extend([jump(BPF_JEQ, number(call), 0, skipped), load(FIRST_ARGUMENT)]);
    program.extend_from_slice(steps);
    program.push(verdict(libc::SECCOMP_RET_ALLOW));
}

fn number(call: c_long) -> u32 {
    u32::try_from(call).expect("numbers of calls are small")
}

fn load(offset: u32) -> sock_filter {
    step(BPF_LD | BPF_W | BPF_ABS, offset, 0, 0)
}

fn jump(comparison: u32, value: u32, if_true: u8, if_false: u8) -> sock_filter {
    step(BPF_JMP | comparison | BPF_K, value, if_true, if_false)
}

fn verdict(value: u32) -> sock_filter {
    step(BPF_RET | BPF_K, value, 0, 0)
}

fn step(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: u16::try_from(code).expect("a BPF code is short"), jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would say: a minimal machine for the steps that are used here.
    fn decide(program: &[sock_filter], arch: u32, call: u32, argument: u32) -> u32 {
        let (mut at, mut register) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let code = u32::from(code);
            let test = |holds: bool| usize::from(if holds { jt } else { jf });
            if code == BPF_LD | BPF_W | BPF_ABS {
                register = match k {
                    NUMBER => call,
                    ARCH => arch,
                    FIRST_ARGUMENT => argument,
                    _ => unreachable!("no other word is looked at"),
                };
            } else if code == BPF_RET | BPF_K {
                return k;
            } else if code == BPF_JMP | BPF_JEQ | BPF_K {
                at += test(register == k);
            } else if code == BPF_JMP | BPF_JGE | BPF_K {
                at += test(register >= k);
            } else {
                assert_eq!(code, BPF_JMP | BPF_JSET | BPF_K);
                at += test(register & k != 0);
            }
        }
    }

    #[test]
    fn verdicts_of_calls() {
        let allow = libc::SECCOMP_RET_ALLOW;
        let thread = (libc::CLONE_THREAD | libc::CLONE_VM) as u32;
        for (processes, signals) in [(false, false), (false, true), (true, false), (true, true)] {
            let program = program(Allowed { processes, signals });
            let say = |call: c_long, argument: u32| decide(&program, ARCHITECTURE, number(call), argument);
            let if_so = |so: bool| if so { allow } else { DENY };
            assert_eq!(say(libc::SYS_read, 0), allow);
            assert_eq!(say(libc::SYS_execve, 0), allow);
            assert_eq!(say(libc::SYS_socket, libc::AF_INET as u32), DENY);
            assert_eq!(say(libc::SYS_socketpair, libc::AF_INET as u32), DENY);
            assert_eq!(say(libc::SYS_socketpair, libc::AF_UNIX as u32), allow);
            assert_eq!(say(libc::SYS_clone, thread), allow);
            assert_eq!(say(libc::SYS_clone, 17), if_so(processes));
            assert_eq!(say(libc::SYS_clone, thread | libc::CLONE_NEWUSER as u32), DENY);
            assert_eq!(say(libc::SYS_clone3, 0), UNKNOWN);
            assert_eq!(say(libc::SYS_kill, 1), if_so(signals));
            assert_eq!(say(libc::SYS_prlimit64, 0), allow);
            assert_eq!(say(libc::SYS_prlimit64, 1), DENY);
            assert_eq!(decide(&program, ARCHITECTURE, LAST + 1, 0), UNKNOWN);
            // The same call by its x32 number.
            assert_eq!(decide(&program, ARCHITECTURE, 0x4000_0000 | number(libc::SYS_socket), 0), UNKNOWN);
            assert_eq!(decide(&program, 0x4000_0003, 0, 0), libc::SECCOMP_RET_KILL_PROCESS);
            for call in [REFUSED, REFUSED_HERE].concat() {
                assert_eq!(say(call, 0), DENY, "{call}");
            }
        }
    }
}
