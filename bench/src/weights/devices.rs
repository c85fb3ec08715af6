//! Pushes that stay on devices, against the speed of a copy on the device.
//!
//! Invariant: a push is timed from the call that publishes to the moment at which a sampler has the weights in a buffer of its
//! own and has digested them there. What the copies in between take is measured in the same run.

use std::time::{Duration, Instant};

use device::device::DeviceLocation;
use device::{Device, DeviceBuffer, bf16};
use rlrun::failure::Failure;
use serde_json::{Map, Value};
use trajectory::PolicyVersion;
use weights::direct::colocated::ColocatedPublisher;
use weights::direct::ipc::{IpcConfig, IpcPublisher};
use weights::direct::nccl::{NcclConfig, NcclPublisher, NcclSubscriber};
use weights::{DevicePublisher, DevicePush, DeviceSubscriber, Hub, HubConfig, WeightsError};

use super::receiver::{self, Receiver};
use super::{SOON, WARM_UP, WeightsBench, random_values, set};
use crate::measure::median;

/// What a push took.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// Until the sampler had it, digested.
    ready: f64,
    push: DevicePush,
}

/// Measures all transports that `place` allows: two GPUs are needed for a broadcast.
pub(super) fn measure(bench: &mut WeightsBench<'_>, place: DeviceLocation) -> Result<(), Failure> {
    let device = Device::open(place)?;
    let values: Vec<bf16> =
        random_values(bench.args.megabytes * 1_000_000 / 4).into_iter().map(bf16::from_f32).collect();
    let trained = device.upload(&values)?;
    drop(values);
    let mut devices = DevicesBench { bench, device, place, trained, copy: f64::NAN };
    devices.copies()?;
    devices.memory()?;
    devices.ipc()?;
    match devices.other() {
        Some(other) => devices.nccl(other),
        None => Ok(()),
    }
}

/// Measurements one after the other.
struct DevicesBench<'a, 'b> {
    bench: &'a mut WeightsBench<'b>,
    device: Device,
    place: DeviceLocation,
    /// `[parameters]`
    trained: DeviceBuffer<bf16>,
    /// Copies, 10^9 bytes per second.
    copy: f64,
}

impl DevicesBench<'_, '_> {
    /// Copies between two buffers of the device.
    fn copies(&mut self) -> Result<(), Failure> {
        let mut target = self.device.zeros::<bf16>(self.trained.len())?;
        let mut seconds = Vec::new();
        for repeat in 0..self.bench.args.repeats as u64 + WARM_UP {
            self.device.synchronize()?;
            let clock = Instant::now();
            self.device.copy(self.trained.all(), target.all_mut())?;
            self.device.synchronize()?;
            if repeat >= WARM_UP {
                seconds.push(clock.elapsed().as_secs_f64());
            }
        }
        self.copy = self.trained.bytes() as f64 / median(&seconds) / 1e9;
        let (mut fields, copy) = (self.fields("device_copy"), self.copy);
        set(&mut fields, "ready_s", median(&seconds));
        set(&mut fields, "gbytes_per_s", copy);
        self.bench.write(&fields)
    }

    /// Pushes to a sampler within the process.
    fn memory(&mut self) -> Result<(), Failure> {
        let hub = Hub::new(HubConfig::default());
        let publisher = ColocatedPublisher::<bf16>::new(hub, &self.device);
        let sampler = publisher.subscribe("sampler", &Device::open(self.place)?)?;
        let taken = self.threads(&publisher, &sampler)?;
        self.report("device_memory", &taken)
    }

    /// Pushes to a sampler in a separate process, on the same device.
    fn ipc(&mut self) -> Result<(), Failure> {
        let hub = Hub::new(HubConfig::default());
        let config = IpcConfig { directory: self.bench.args.shm.clone(), wait: SOON };
        let publisher = IpcPublisher::<bf16>::new(hub.clone(), &self.device, &config)?;
        let mut receiver =
            Receiver::start(hub, &self.bench.args.shm, &["--device", &self.place.to_string()])?;
        let mut taken = Vec::new();
        for version in 0..self.bench.args.repeats as u64 + WARM_UP {
            let started = receiver::now_ns();
            publisher.publish(PolicyVersion(version), self.trained.all())?;
            let received = receiver.wait(version)?;
            let ready = received.at_ns.saturating_sub(started) as f64 / 1e9;
            taken.extend(publisher.last_push()?.map(|push| Taken { ready, push }));
        }
        self.report("device_ipc", &taken)
    }

    /// Broadcasts to a sampler on `other`.
    fn nccl(&mut self, other: DeviceLocation) -> Result<(), Failure> {
        let hub = Hub::new(HubConfig::default());
        let publisher = NcclPublisher::<bf16>::new(hub.clone(), &self.device, NcclConfig::default());
        let sampler = NcclSubscriber::<bf16>::within(&hub, "sampler", &Device::open(other)?)?;
        // The publisher asks for its participation before the first version.
        sampler.newest(None)?;
        let taken = self.threads(&publisher, &sampler)?;
        self.report("device_nccl", &taken)
    }

    /// Pushes to a sampler that waits on a separate thread.
    fn threads(
        &self,
        publisher: &dyn DevicePublisher<bf16>,
        sampler: &dyn DeviceSubscriber<bf16>,
    ) -> Result<Vec<Taken>, Failure> {
        let mut taken = Vec::new();
        for version in (0..self.bench.args.repeats as u64 + WARM_UP).map(PolicyVersion) {
            let started = Instant::now();
            let ready = std::thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    let after = version.0.checked_sub(1).map(PolicyVersion);
                    let new = sampler.wait_newer(after, SOON)?.filter(|new| new.version == version);
                    let new = new.ok_or_else(|| late(version))?;
                    let ready = started.elapsed().as_secs_f64();
                    sampler.applied(new.receipt(Duration::ZERO))?;
                    sampler.give_back(new.values);
                    Ok::<_, WeightsError>(ready)
                });
                let published = publisher.publish(version, self.trained.all());
                let ready = waiting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                published.and(ready)
            })?;
            taken.extend(publisher.last_push()?.map(|push| Taken { ready, push }));
        }
        Ok(taken)
    }

    /// Another device for a sampler; emulated ones are many.
    fn other(&self) -> Option<DeviceLocation> {
        let DeviceLocation::Cuda(own) = self.place else { return Some(self.place) };
        let gpus = device::inventory::inventory().gpus;
        gpus.iter().map(|gpu| gpu.ordinal).find(|ordinal| *ordinal != own).map(DeviceLocation::Cuda)
    }

    fn report(&mut self, of: &str, taken: &[Taken]) -> Result<(), Failure> {
        let taken = &taken[(WARM_UP as usize).min(taken.len())..];
        let of_all = |part: fn(&Taken) -> f64| median(&taken.iter().map(part).collect::<Vec<_>>());
        let (bytes, ready) = (self.trained.bytes() as f64, of_all(|taken| taken.ready));
        let moved = of_all(|taken| taken.push.moved.as_secs_f64());
        let mut fields = self.fields(of);
        set(&mut fields, "ready_s", ready);
        set(&mut fields, "moved_s", moved);
        set(&mut fields, "push_s", of_all(|taken| taken.push.took.as_secs_f64()));
        set(&mut fields, "gbytes_per_s", bytes / ready / 1e9);
        set(&mut fields, "of_device_copy", bytes / ready / 1e9 / self.copy);
        set(&mut fields, "moved_of_device_copy", bytes / moved / 1e9 / self.copy);
        self.bench.write(&fields)
    }

    fn fields(&self, of: &str) -> Map<String, Value> {
        let mut fields = self.bench.fields(of);
        set(&mut fields, "device", self.place.to_string());
        set(&mut fields, "bytes", self.trained.bytes());
        fields
    }
}

/// A sampler that got nothing.
fn late(version: PolicyVersion) -> WeightsError {
    WeightsError::NotApplied { version, waited: SOON, behind: "the sampler".to_owned() }
}
