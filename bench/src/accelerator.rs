//! A device that something is measured on, and its limits.
//!
//! Invariant: limits are measured in what the work stores its numbers in, by the same library of products; the traffic limit
//! counts what a copy reads and what it writes.

use std::time::Instant;

use device::device::DeviceLocation;
use device::{Device, DeviceBuffer, Matrix, MatrixMut, Storage, bf16};
use model::on_device::DeviceDtype;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rlrun::args::DeviceArgs;
use rlrun::failure::Failure;
use serde_json::{Value, json};

use crate::machine::Peaks;

/// The best of so many tries counts: a limit is what was reached once.
const TRIES: usize = 5;

/// A device, opened for its limits alone.
#[derive(Debug)]
pub struct Accelerator {
    /// Which it is.
    pub place: DeviceLocation,
    /// The number format of weights and activations.
    pub dtype: DeviceDtype,
    device: Device,
}

impl Accelerator {
    /// The device that `args` name; `None` for the processor.
    ///
    /// # Errors
    /// If it is not there; a dtype without a device.
    pub fn open(args: &DeviceArgs) -> Result<Option<Self>, Failure> {
        args.device()?.map(|(place, dtype)| Self::at(place, dtype)).transpose()
    }

    /// The device at `place`, where numbers have the type `dtype`.
    ///
    /// # Errors
    /// If it is not there.
    pub fn at(place: DeviceLocation, dtype: DeviceDtype) -> Result<Self, Failure> {
        Ok(Self { place, dtype, device: Device::open(place)? })
    }

    /// What a result says of it.
    #[must_use]
    pub fn settings(&self) -> [(&'static str, Value); 2] {
        [("device", json!(self.place.to_string())), ("dtype", json!(self.word()))]
    }

    /// Measures both limits.
    ///
    /// # Errors
    /// If the device fails or has no memory.
    pub fn peaks(&self) -> Result<Peaks, Failure> {
        match self.dtype {
            DeviceDtype::F32 => self.measured::<f32>(),
            DeviceDtype::Bf16 => self.measured::<bf16>(),
        }
    }

    /// The device in one line.
    #[must_use]
    pub fn describe(&self, peaks: &Peaks) -> String {
        format!(
            "{}: at most {:.0} GFLOP/s of products in {}, {:.1} GB/s of a copy, read and written",
            self.device.name(),
            peaks.gflops,
            self.word(),
            peaks.gbytes_per_s
        )
    }

    fn word(&self) -> &'static str {
        match self.dtype {
            DeviceDtype::F32 => "f32",
            DeviceDtype::Bf16 => "bf16",
        }
    }

    fn measured<T: Storage>(&self) -> Result<Peaks, Failure> {
        // Enough for a GPU to be busy with, and for an emulator not to be.
        let (width, bytes) = match self.place {
            DeviceLocation::Cuda(_) => (8192, 1 << 30),
            DeviceLocation::Emulated => (64, 1 << 20),
        };
        let device = self.device.labelled("limits");
        // Random values: products of zeros draw less power, and are faster.
        let (a, b) = (random::<T>(&device, width * width)?, random::<T>(&device, width * width)?);
        let mut c = device.zeros::<T>(width * width)?;
        let product = self.best(|| {
            let (a, b) = (Matrix::new(a.all(), width), Matrix::new(b.all(), width));
            device.product(a, b, MatrixMut::new(c.all_mut(), width), 1.0, 0.0)
        })?;
        drop((a, b, c));
        let from = device.zeros::<u8>(bytes)?;
        let mut to = device.zeros::<u8>(bytes)?;
        let copy = self.best(|| device.copy(from.all(), to.all_mut()))?;
        let (flops, moved) = (2.0 * (width as f64).powi(3), 2.0 * bytes as f64);
        Ok(Peaks { gflops: flops / product / 1e9, gbytes_per_s: moved / copy / 1e9 })
    }

    /// The shortest time of several runs after a warm-up run, seconds.
    fn best(&self, mut work: impl FnMut() -> device::Result<()>) -> Result<f64, Failure> {
        let mut best = f64::INFINITY;
        for attempt in 0..=TRIES {
            self.device.synchronize()?;
            let clock = Instant::now();
            work()?;
            self.device.synchronize()?;
            if attempt > 0 {
                best = best.min(clock.elapsed().as_secs_f64());
            }
        }
        Ok(best)
    }
}

/// `[len]` values between -1 and 1.
fn random<T: Storage>(device: &Device, len: usize) -> device::Result<DeviceBuffer<T>> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    // Pieces of one list, each from another place of it.
    let piece = len.min(1 << 16);
    let values = (0..2 * piece).map(|_| T::narrow(rng.next_u32().cast_signed() as f32 / 2.0_f32.powi(31)));
    let list = device.upload(&values.collect::<Vec<T>>())?;
    let mut all = device.uninit(len)?;
    for (index, first) in (0..len).step_by(piece).enumerate() {
        let (last, from) = ((first + piece).min(len), index * 7919 % piece);
        device.copy(list.view(from..from + last - first), all.view_mut(first..last))?;
    }
    Ok(all)
}
