//! Ranks that are emulated devices.

use std::thread;
use std::time::Duration;

use collective::{Collective, InDeviceMemory, even_shards};
use device::device::DeviceLocation;
use device::group::DeviceGroupId;
use device::{Device, DeviceGroup};

/// Ranks.
const WORLD: usize = 3;

/// Runs `work` on every rank, each on a thread of its own.
fn on_all(work: impl Fn(DeviceGroup) + Sync) {
    let id = DeviceGroupId::new(&Device::open(DeviceLocation::Emulated).expect("it is emulated"))
        .expect("an identifier");
    thread::scope(|scope| {
        for rank in 0..WORLD {
            let (id, work) = (&id, &work);
            scope.spawn(move || {
                let device = Device::open(DeviceLocation::Emulated).expect("it is emulated");
                work(DeviceGroup::join(&device, id, rank, WORLD, Duration::from_secs(60)).expect("all join"));
            });
        }
    });
}

/// The `rank`th part of a sum, `[len]`.
fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| (rank * 10 + at) as f32).collect()
}

#[test]
fn devices_sum_gather_and_broadcast() {
    on_all(|group| {
        let ranks: &dyn Collective<InDeviceMemory<f32>> = &group;
        let (device, rank, len) = (group.device(), ranks.rank(), 10);
        let expected: Vec<f32> = (0..len).map(|at| (0..WORLD).map(|r| values(r, len)[at]).sum()).collect();
        let mut sums = device.upload(&values(rank, len)).expect("it has memory");
        ranks.all_reduce(sums.all_mut()).expect("sums in place");
        ranks.barrier().expect("all ranks come");
        assert_eq!(device.download(sums.all()).expect("it is there"), expected);
        let (shards, all) =
            (even_shards(len, WORLD), device.upload(&values(rank, len)).expect("it has memory"));
        let mut own = device.zeros(shards[rank].len()).expect("it has memory");
        ranks.reduce_scatter(all.all(), &shards, own.all_mut()).expect("sums");
        assert_eq!(device.download(own.all()).expect("it is there"), expected[shards[rank].clone()]);
        let mut gathered = device.zeros(len).expect("it has memory");
        ranks.all_gather(own.all(), &shards, gathered.all_mut()).expect("gathers");
        ranks.broadcast(1, gathered.all_mut()).expect("a broadcast");
        assert_eq!(device.download(gathered.all()).expect("it is there"), expected);
    });
}

#[test]
fn every_pair_of_devices_exchanges() {
    on_all(|group| {
        let ranks: &dyn Collective<InDeviceMemory<u32>> = &group;
        let (device, rank) = (group.device(), ranks.rank());
        // Rank `from` sends `from + to` values to rank `to`.
        let ranges = |len: &dyn Fn(usize) -> usize| -> Vec<std::ops::Range<usize>> {
            let mut end = 0;
            let mut next = |peer: usize| {
                end += len(peer);
                end - len(peer)..end
            };
            (0..WORLD).map(&mut next).collect()
        };
        let both = ranges(&|peer| rank + peer);
        let part = |from: usize, to: usize| vec![(from * 10 + to) as u32; from + to];
        let sent: Vec<u32> = (0..WORLD).flat_map(|to| part(rank, to)).collect();
        let sent = device.upload(&sent).expect("it has memory");
        let mut received =
            device.zeros::<u32>(both.last().map_or(0, |last| last.end)).expect("it has memory");
        ranks.all_to_all(sent.all(), &both, received.all_mut(), &both).expect("all pairs exchange");
        let expected: Vec<u32> = (0..WORLD).flat_map(|from| part(from, rank)).collect();
        assert_eq!(device.download(received.all()).expect("it is there"), expected);
    });
}
