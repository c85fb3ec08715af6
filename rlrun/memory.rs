//! The resident memory of this process and its children, and the free memory of the machine.
//!
//! Invariant: sizes are MiB of resident memory. What a system does not say is unknown, and none is invented.

use std::fs;
use std::process::Command;

/// Memory of this process around a piece of work, MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryUse {
    /// Resident before; where the system does not say, most that was resident until then.
    pub before: f64,
    /// Most that was resident until the end of it. Where the system does not let a process forget its peak, that of
    /// the whole process so far.
    pub peak: f64,
}

/// The peak of the memory since some moment.
#[derive(Clone, Copy, Debug)]
pub struct PeakMemory {
    before: f64,
}

impl PeakMemory {
    /// Forgets the peak so far.
    #[must_use]
    pub fn start() -> Self {
        // 5 sets the peak to what is resident now (proc(5)). A system that refuses leaves the older peak, as documented.
        let _ = fs::write("/proc/self/clear_refs", "5");
        Self { before: status("VmRSS:").unwrap_or_else(peak_mib) }
    }

    /// The peak since.
    #[must_use]
    pub fn stop(self) -> MemoryUse {
        // The system counts in batches, so that the two can disagree by a few pages.
        MemoryUse { before: self.before, peak: peak_mib().max(self.before) }
    }
}

/// Most memory that was resident in this process so far, MiB.
#[must_use]
pub fn peak_mib() -> f64 {
    status("VmHWM:").unwrap_or_else(|| model::machine::peak_memory() as f64 / f64::from(1 << 20))
}

/// Memory of another process that is resident now, and most that was so far, MiB; `None` on a system that does not say.
#[must_use]
pub fn of_process(id: u32) -> Option<(f64, f64)> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let mib = |name| Some(kibibytes(&status, name)? as f64 / 1024.0);
    Some((mib("VmRSS:")?, mib("VmHWM:")?))
}

/// A size of `/proc/self/status`, MiB.
fn status(name: &str) -> Option<f64> {
    Some(kibibytes(&fs::read_to_string("/proc/self/status").ok()?, name)? as f64 / 1024.0)
}

/// Memory that the machine has left, bytes; `None` on a system that does not say.
#[must_use]
pub fn available() -> Option<usize> {
    if cfg!(target_os = "macos") {
        let counted = Command::new("/usr/bin/vm_stat").output().ok()?;
        return free_of_vm_stat(&String::from_utf8_lossy(&counted.stdout));
    }
    Some(kibibytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?.saturating_mul(1024))
}

/// Bytes that macOS can give to a process, from what `vm_stat` prints: pages that are free or inactive.
fn free_of_vm_stat(text: &str) -> Option<usize> {
    let page: usize = text.split_once("page size of ")?.1.split_whitespace().next()?.parse().ok()?;
    let pages = |name: &str| -> Option<usize> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches('.').parse().ok()
    };
    let pages = pages("Pages free:")? + pages("Pages inactive:")? + pages("Pages speculative:")?;
    Some(pages.saturating_mul(page))
}

/// The number behind `name` in lines such as `VmRSS:  1234 kB`.
fn kibibytes(text: &str, name: &str) -> Option<usize> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use memmap2::MmapMut;

    use super::*;

    #[test]
    fn the_peak_of_the_memory_contains_what_was_written_meanwhile() {
        const MIB: usize = 48;
        let memory = PeakMemory::start();
        let mut map = MmapMut::map_anon(MIB << 20).unwrap();
        map.fill(1);
        drop(map);
        let MemoryUse { before, peak } = memory.stop();
        let asked = model::machine::peak_memory() >> 20;
        assert!((40..1 << 20).contains(&asked), "{asked} MiB");
        // Other tests take and give back memory meanwhile.
        assert!(before > 0.0 && peak >= before.max(0.9 * MIB as f64), "{before} MiB before, {peak} at most");
    }

    #[test]
    fn sizes_are_read_as_the_system_writes_them() {
        assert_eq!(kibibytes("VmPeak: 1 kB\nVmHWM:\t  2048 kB\n", "VmHWM:"), Some(2048));
        assert_eq!(kibibytes("VmHWM: many kB\n", "VmHWM:"), None);
        let counted = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n\
            Pages free:                               10.\nPages active:                             99.\n\
            Pages inactive:                           20.\nPages speculative:                         3.\n";
        assert_eq!(free_of_vm_stat(counted), Some(33 * 16384));
        assert_eq!(free_of_vm_stat("no such thing"), None);
    }
}
