//! The limits of the machine, measured.
//!
//! Invariant: a limit is measured with the number of threads of the work that is compared with it. The arithmetic limit
//! is f32 arithmetic on the widest vectors the decoder uses. The traffic limit is the bandwidth of reads from memory that
//! no cache holds.

use std::fs;
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use rlrun::failure::Failure;

/// Multiply-adds between two readings of the clock.
const ROUNDS: u32 = 20_000;
/// How long each try at the arithmetic limit takes.
const TRY: Duration = Duration::from_millis(40);
/// The best of so many tries counts: a limit is what was reached once.
const TRIES: usize = 3;
/// Least memory that is read, bytes.
const LEAST_READ: usize = 64 << 20;
/// Most memory that is read, bytes: enough for any cache, and not all of a small machine.
const MOST_READ: usize = 512 << 20;

/// The limits of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// f32 operations, 10^9 per second.
    pub gflops: f64,
    /// Memory read, 10^9 bytes per second.
    pub gbytes_per_s: f64,
}

/// The machine as seen by a number of threads.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    threads: usize,
    /// Bytes that one measurement of the memory bandwidth reads.
    read: usize,
}

impl Machine {
    /// The machine for `threads` threads, at least one.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let spare = rlrun::memory::available().unwrap_or(usize::MAX) / 4;
        let read = last_level_cache().unwrap_or(0).saturating_mul(2).clamp(LEAST_READ, MOST_READ);
        Self { threads: threads.max(1), read: read.min(spare).max(1 << 20) }
    }

    /// Threads that share the work.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Measures both limits. What it reads is mapped for as long as it takes and given back.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub fn peaks(&self) -> Result<Peaks, Failure> {
        let flops = together(&mut vec![(); self.threads], TRIES, |()| {
            let (clock, mut done) = (Instant::now(), 0.0);
            while clock.elapsed() < TRY {
                done += model::bench::multiply_adds(ROUNDS);
            }
            done
        });
        let share = self.read / self.threads / 4096 * 4096;
        let map = || MmapMut::map_anon(share.max(4096));
        let system = |source| Failure::System { what: format!("map {} bytes", self.read), source };
        let mut maps = (0..self.threads).map(|_| map()).collect::<Result<Vec<_>, _>>().map_err(system)?;
        // Memory that was never written is one page of zeros, which is in every cache.
        together(&mut maps, 1, |map| {
            map.fill(1);
            0.0
        });
        let bytes = together(&mut maps, TRIES, |map| {
            let values: &[f32] = bytemuck::cast_slice(map);
            std::hint::black_box(model::bench::read(values));
            size_of_val(values) as f64
        });
        Ok(Peaks { gflops: flops / 1e9, gbytes_per_s: bytes / 1e9 })
    }

    /// The machine in one line.
    #[must_use]
    pub fn describe(&self, peaks: &Peaks) -> String {
        let name = processor().unwrap_or_else(|| "a processor without a name".to_owned());
        format!(
            "{} threads of {name}: at most {:.0} GFLOP/s in f32, {:.1} GB/s from memory",
            self.threads, peaks.gflops, peaks.gbytes_per_s
        )
    }
}

/// Lets every thread do `work` on its own part at the same time; returns what was done per second, the best of
/// `tries`.
fn together<P: Send>(parts: &mut [P], tries: usize, work: impl Fn(&mut P) -> f64 + Sync) -> f64 {
    let mut best = 0.0_f64;
    for _ in 0..tries {
        let start = Barrier::new(parts.len());
        let timed = |part: &mut P| {
            start.wait();
            let clock = Instant::now();
            let done = work(part);
            (done, clock.elapsed().as_secs_f64())
        };
        let results: Vec<(f64, f64)> = std::thread::scope(|scope| {
            let threads: Vec<_> = parts.iter_mut().map(|part| scope.spawn(|| timed(part))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let slowest = results.iter().map(|(_, seconds)| *seconds).fold(f64::MIN_POSITIVE, f64::max);
        best = best.max(results.iter().map(|(done, _)| done).sum::<f64>() / slowest);
    }
    best
}

/// Bytes of the largest cache of the first core.
fn last_level_cache() -> Option<usize> {
    let folder = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let sizes =
        folder.filter_map(|entry| cache_size(&fs::read_to_string(entry.ok()?.path().join("size")).ok()?));
    sizes.max()
}

/// Bytes of a size such as `48K` or `32M`.
fn cache_size(text: &str) -> Option<usize> {
    let text = text.trim();
    let (number, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    number.parse::<usize>().ok()?.checked_mul(unit)
}

fn processor() -> Option<String> {
    if cfg!(target_os = "macos") {
        let named =
            Command::new("/usr/sbin/sysctl").args(["-n", "machdep.cpu.brand_string"]).output().ok()?;
        let name = String::from_utf8_lossy(&named.stdout).trim().to_owned();
        return Some(name).filter(|name| !name.is_empty());
    }
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_of_two_threads_are_finite() {
        let machine = Machine { threads: 2, read: 8 << 20 };
        let Peaks { gflops, gbytes_per_s } = machine.peaks().unwrap();
        assert!(gflops > 0.0 && gflops.is_finite(), "{gflops}");
        assert!(gbytes_per_s > 0.0 && gbytes_per_s.is_finite(), "{gbytes_per_s}");
    }

    #[test]
    fn sizes_are_read_as_the_system_writes_them() {
        assert_eq!(cache_size("48K\n"), Some(48 << 10));
        assert_eq!(cache_size("32M\n"), Some(32 << 20));
        assert_eq!(cache_size("big"), None);
    }
}
