//! The system calls that a confined program may not make, as a BPF program for seccomp.
//!
//! Invariant: a refused call fails with an error that the program can report; only a call of a foreign architecture kills it.
//! The list has the calls that reach beyond the process (network, other processes, memory that no limit counts, the kernel
//! itself) and those that change files in ways that Landlock does not guard (modes, owners, times). Calls newer than the list
//! fail as unknown, and so do the x32 numbers of x86-64, which would be second numbers of the same calls. `seccompiler`
//! compares single numbers only, so four instructions before its program make that comparison.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    sock_filter,
};

/// Calls that a program may make in addition to those that are always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AllowedCalls {
    /// Start processes; threads are always allowed.
    pub(super) processes: bool,
    /// Send signals, which is harmless where no other process can be seen.
    pub(super) signals: bool,
}

/// The last call that was considered, of Linux 6.18.
const LAST: u32 = 469;

/// Offset of the number of a call in `struct seccomp_data`.
const NUMBER: u32 = 0;

/// The flags of `clone` that make a namespace.
const NEW_NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Refused on every architecture.
const REFUSED: &[c_long] = &[
    // Network; `socketpair` has a rule of its own.
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
    // Ways around this filter, and parts of the kernel with a long history of vulnerabilities.
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
    // Changes of other files that Landlock does not guard.
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
    // fchmodat2, setxattrat, removexattrat, open_tree_attr, file_setattr: which `libc` does not name yet.
    452,
    463,
    466,
    467,
    469,
];

/// Refused on this architecture.
#[cfg(target_arch = "x86_64")]
const REFUSED_BY_ARCHITECTURE: &[c_long] = &[
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
const REFUSED_BY_ARCHITECTURE: &[c_long] = &[libc::SYS_kexec_file_load];

/// Calls that start a process, except `clone`.
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

/// Calls, and the second arguments with which they make the kernel send a signal to a process of the caller's choice, as it does
/// for the owner of a socket: `F_SETOWN`, `F_SETSIG` and `F_SETOWN_EX`, `FIOSETOWN` and `SIOCSPGRP`.
const OWNERS: [(c_long, &[i32]); 2] = [(libc::SYS_fcntl, &[8, 10, 15]), (libc::SYS_ioctl, &[0x8901, 0x8902])];

/// The filter, to be loaded as it is; never empty.
pub(super) fn program(allowed: AllowedCalls) -> BpfProgram {
    let none: &[c_long] = &[];
    let forks = if allowed.processes { none } else { FORKS };
    let signals = if allowed.signals { none } else { SIGNALS };
    let mut rules: BTreeMap<c_long, Vec<SeccompRule>> = [REFUSED, REFUSED_BY_ARCHITECTURE, forks, signals]
        .concat()
        .into_iter()
        .map(|call| (call, vec![]))
        .collect();
    let mut clone: Vec<_> =
        NEW_NAMESPACES.iter().map(|flag| refuse_if(0, SeccompCmpOp::MaskedEq(bits(*flag)), *flag)).collect();
    if !allowed.processes {
        clone.push(refuse_if(0, SeccompCmpOp::MaskedEq(bits(libc::CLONE_THREAD)), 0));
    }
    rules.insert(libc::SYS_clone, clone);
    rules.insert(libc::SYS_socketpair, vec![refuse_if(0, SeccompCmpOp::Ne, libc::AF_UNIX)]);
    // Only limits of the calling process.
    rules.insert(libc::SYS_prlimit64, vec![refuse_if(0, SeccompCmpOp::Ne, 0)]);
    if !allowed.signals {
        let refused = |of: &[i32]| of.iter().map(|value| refuse_if(1, SeccompCmpOp::Eq, *value)).collect();
        rules.extend(OWNERS.map(|(call, of)| (call, refused(of))));
    }
    let architecture = std::env::consts::ARCH.try_into().expect("seccompiler knows the architecture");
    let denied = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, architecture);
    let filter: BpfProgram = filter.and_then(TryInto::try_into).expect("the filter is short enough");
    [unknown_calls(), filter].concat()
}

/// Fails calls with a number above [`LAST`] as unknown, and `clone3`: its flags are in memory, which a filter cannot read, and C
/// libraries fall back on `clone`.
fn unknown_calls() -> BpfProgram {
    let clone3 = u32::try_from(libc::SYS_clone3).expect("numbers of calls are small");
    vec![
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, NUMBER, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, LAST + 1, 1, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, clone3, 0, 1),
        instruction(libc::BPF_RET | libc::BPF_K, UNKNOWN, 0, 0),
    ]
}

const UNKNOWN: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: u16::try_from(code).expect("a BPF code is short"), jt, jf, k }
}

/// Refuses a call by the low half of an argument, counted from 0.
fn refuse_if(argument: u8, comparison: SeccompCmpOp, value: i32) -> SeccompRule {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, comparison, bits(value))
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .expect("a call has six arguments")
}

fn bits(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
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

#[cfg(test)]
mod tests {
    use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};

    use super::*;

    #[cfg(target_arch = "x86_64")]
    const ARCHITECTURE: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    const ARCHITECTURE: u32 = 0xc000_00b7;
    const ARCH: u32 = 4;
    const FIRST_ARGUMENT: u32 = 16;
    const SECOND_ARGUMENT: u32 = 24;
    const DENY: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;

    /// The answer of the kernel: an interpreter of the instructions that the filter uses.
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
                    FIRST_ARGUMENT | SECOND_ARGUMENT => argument,
                    word => panic!("the filter reads word {word}"),
                };
            } else if code == BPF_RET | BPF_K {
                return k;
            } else if code == BPF_ALU | BPF_AND | BPF_K {
                register &= k;
            } else if code == BPF_JMP | BPF_JA {
                at += k as usize;
            } else if code == BPF_JMP | BPF_JEQ | BPF_K {
                at += test(register == k);
            } else {
                assert_eq!(code, BPF_JMP | BPF_JGE | BPF_K);
                at += test(register >= k);
            }
        }
    }

    fn number(call: c_long) -> u32 {
        u32::try_from(call).unwrap()
    }

    #[test]
    fn each_call_is_allowed_or_refused_as_listed() {
        let allow = libc::SECCOMP_RET_ALLOW;
        let thread = (libc::CLONE_THREAD | libc::CLONE_VM) as u32;
        for (processes, signals) in [(false, false), (false, true), (true, false), (true, true)] {
            let program = program(AllowedCalls { processes, signals });
            let verdict =
                |call: c_long, argument: u32| decide(&program, ARCHITECTURE, number(call), argument);
            let allow_if = |allowed: bool| if allowed { allow } else { DENY };
            assert_eq!(verdict(libc::SYS_read, 0), allow);
            assert_eq!(verdict(libc::SYS_execve, 0), allow);
            assert_eq!(verdict(libc::SYS_socket, libc::AF_INET as u32), DENY);
            assert_eq!(verdict(libc::SYS_socketpair, libc::AF_INET as u32), DENY);
            assert_eq!(verdict(libc::SYS_socketpair, libc::AF_UNIX as u32), allow);
            assert_eq!(verdict(libc::SYS_clone, thread), allow);
            assert_eq!(verdict(libc::SYS_clone, 17), allow_if(processes));
            for flag in NEW_NAMESPACES {
                assert_eq!(verdict(libc::SYS_clone, thread | flag.cast_unsigned()), DENY);
            }
            assert_eq!(verdict(libc::SYS_clone3, 0), UNKNOWN);
            assert_eq!(verdict(libc::SYS_kill, 1), allow_if(signals));
            assert_eq!(verdict(libc::SYS_fcntl, libc::F_SETOWN as u32), allow_if(signals));
            assert_eq!(verdict(libc::SYS_ioctl, 0x8901), allow_if(signals));
            assert_eq!(verdict(libc::SYS_fcntl, libc::F_GETFL as u32), allow);
            assert_eq!(verdict(libc::SYS_prlimit64, 0), allow);
            assert_eq!(verdict(libc::SYS_prlimit64, 1), DENY);
            assert_eq!(decide(&program, ARCHITECTURE, LAST + 1, 0), UNKNOWN);
            // The same call by its x32 number.
            assert_eq!(decide(&program, ARCHITECTURE, 0x4000_0000 | number(libc::SYS_socket), 0), UNKNOWN);
            assert_eq!(decide(&program, 0x4000_0003, 0, 0), libc::SECCOMP_RET_KILL_PROCESS);
            for call in [REFUSED, REFUSED_BY_ARCHITECTURE].concat() {
                assert_eq!(verdict(call, 0), DENY, "{call}");
            }
        }
    }
}
