//! The resident memory of this process and its children.
//!
//! Invariant: sizes are MiB of resident memory. On a system without `/proc` the size is unknown and none is invented.

use std::fs;

/// Memory of this process around a piece of work, MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryUse {
    /// Resident before.
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
        Self { before: status("VmRSS:").unwrap_or(0.0) }
    }

    /// The peak since.
    #[must_use]
    pub fn stop(self) -> MemoryUse {
        // The system counts in batches, so that the two can disagree by a few pages.
        MemoryUse { before: self.before, peak: peak_mib().unwrap_or(0.0).max(self.before) }
    }
}

/// Most memory that was resident in this process so far, MiB; `None` on a system that does not say.
#[must_use]
pub fn peak_mib() -> Option<f64> {
    status("VmHWM:")
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
    Some(kibibytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?.saturating_mul(1024))
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
        // Other tests take and give back memory meanwhile.
        let known = before > 0.0;
        assert!(!known || peak >= before.max(0.9 * MIB as f64), "{before} MiB before, {peak} at most");
    }

    #[test]
    fn sizes_are_read_as_the_system_writes_them() {
        assert_eq!(kibibytes("VmPeak: 1 kB\nVmHWM:\t  2048 kB\n", "VmHWM:"), Some(2048));
        assert_eq!(kibibytes("VmHWM: many kB\n", "VmHWM:"), None);
    }
}
