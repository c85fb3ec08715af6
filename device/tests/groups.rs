//! Device groups: results, and failures of a rank.

#![cfg(feature = "emulator")]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::device::DeviceLocation;
use device::{Device, DeviceError, DeviceGroup, DeviceGroupId, GroupTimeout, bf16};
use proptest::prelude::*;

use crate::common::noise;

const SOON: Duration = Duration::from_secs(20);

fn emulated() -> Device {
    Device::open(DeviceLocation::Emulated).unwrap()
}

/// Runs every rank of a new group on its own thread; results in order of rank.
fn together<R: Send>(world: usize, work: impl Fn(DeviceGroup) -> R + Sync) -> Vec<R> {
    let id = DeviceGroupId::from_bytes(&DeviceGroupId::new(&emulated()).unwrap().to_bytes());
    std::thread::scope(|scope| {
        let start = |rank| {
            let (id, work) = (&id, &work);
            scope.spawn(move || work(DeviceGroup::join(&emulated(), id, rank, world, SOON).unwrap()))
        };
        let threads: Vec<_> = (0..world).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Consecutive ranges of these lengths.
fn ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    lengths
        .iter()
        .map(|len| {
            end += len;
            end - len..end
        })
        .collect()
}

fn reason(error: &DeviceError) -> String {
    assert!(matches!(error, DeviceError::Group { .. }), "{error}");
    error.to_string()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn shards_of_any_length_are_reduced_and_gathered(lengths in prop::collection::vec(0_usize..40, 1..=3)) {
        let (cuts, all) = (ranges(&lengths), lengths.iter().sum::<usize>());
        let given = |rank: usize| noise(all, rank as u64 + 1);
        // The emulator sums in order of rank.
        let sums: Vec<f32> =
            (0..all).map(|i| (1..cuts.len()).fold(given(0)[i], |sum, rank| sum + given(rank)[i])).collect();
        let results = together(cuts.len(), |group| {
            let (device, cut) = (group.device(), cuts[group.rank()].clone());
            let values = device.upload(&given(group.rank())).unwrap();
            let mut own = device.zeros::<f32>(cut.len()).unwrap();
            group.reduce_scatter(values.all(), &cuts, own.all_mut()).unwrap();
            let mut gathered = device.zeros::<f32>(all).unwrap();
            group.all_gather(own.all(), &cuts, gathered.all_mut()).unwrap();
            let mut in_place = device.zeros::<f32>(all).unwrap();
            device.copy(own.all(), in_place.view_mut(cut)).unwrap();
            group.all_gather_in_place(&cuts, in_place.all_mut()).unwrap();
            group.wait("gather").unwrap();
            (device.download(gathered.all()).unwrap(), device.download(in_place.all()).unwrap())
        });
        for (gathered, in_place) in results {
            prop_assert_eq!(&gathered, &sums);
            prop_assert_eq!(&in_place, &sums);
        }
    }
}

#[test]
fn a_broadcast_copies_the_values_of_the_root() {
    for world in 1..=3 {
        for root in 0..world {
            let found = together(world, |group| {
                let device = group.device();
                let own: Vec<bf16> = noise(9, group.rank() as u64).into_iter().map(bf16::from_f32).collect();
                let mut values = device.upload(&own).unwrap();
                if group.rank() == root {
                    group.broadcast_own(values.view(2..9)).unwrap();
                } else {
                    group.broadcast(root, values.view_mut(2..9)).unwrap();
                }
                group.broadcast(root, values.view_mut(0..0)).unwrap();
                group.wait("broadcast").unwrap();
                (own, device.download(values.all()).unwrap())
            });
            for (own, values) in &found {
                assert_eq!(values[2..], found[root].0[2..]);
                assert_eq!(values[..2], own[..2], "nothing else is touched");
            }
        }
    }
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    let id = DeviceGroupId::new(&emulated()).unwrap();
    let started = Instant::now();
    let error = DeviceGroup::join(&emulated(), &id, 0, 2, Duration::from_millis(50)).unwrap_err();
    assert!(started.elapsed() >= Duration::from_millis(50));
    assert!(reason(&error).contains("`join`: rank 1 did not join"), "{error}");
}

#[test]
fn a_wait_ends_for_an_external_reason() {
    let id = DeviceGroupId::new(&emulated()).unwrap();
    let asked = Instant::now();
    let give_up = move || (asked.elapsed() > Duration::from_millis(30)).then(|| "the world ends".to_owned());
    let timeout = GroupTimeout { deadline: SOON, give_up: Some(Arc::new(give_up)) };
    let error = DeviceGroup::join(&emulated(), &id, 0, 2, timeout).unwrap_err();
    assert!(reason(&error).contains("`join`: the world ends") && asked.elapsed() < SOON, "{error}");
}

#[test]
fn a_rank_that_leaves_is_named_at_once_and_the_others_form_a_new_group() {
    let started = Instant::now();
    let found = together(3, |group| {
        let mut values = group.device().upload(&[group.rank() as f32]).unwrap();
        group.broadcast(0, values.all_mut()).unwrap();
        if group.rank() == 2 {
            return String::new();
        }
        let error = group.broadcast(0, values.all_mut()).unwrap_err();
        let again = group.wait("anything").unwrap_err();
        assert!(reason(&again).contains("`anything`: the group is unusable"), "{again}");
        reason(&error)
    });
    assert!(started.elapsed() < SOON, "no rank waits for the deadline");
    // A rank that notices leaves too, so the other may name either.
    assert!(found[..2].iter().all(|text| text.contains("has left")), "{found:?}");
    assert!(found[..2].iter().any(|text| text.contains("rank 2 has left")), "{found:?}");
    let sums = together(2, |group| {
        let mut own = group.device().zeros::<f32>(1).unwrap();
        let values = group.device().upload(&[1.0, 2.0]).unwrap();
        group.reduce_scatter(values.all(), &[0..1, 1..2], own.all_mut()).unwrap();
        group.device().download(own.all()).unwrap()[0]
    });
    assert_eq!(sums, [2.0, 4.0], "a new group works");
}

#[test]
fn a_late_call_makes_the_group_unusable() {
    let id = DeviceGroupId::new(&emulated()).unwrap();
    let join = |rank| DeviceGroup::join(&emulated(), &id, rank, 2, Duration::from_secs(1)).unwrap();
    std::thread::scope(|scope| {
        let idle = scope.spawn(|| join(1));
        let group = join(0);
        let error =
            group.all_gather_in_place(&[0..1, 1..2], group.device().zeros::<f32>(2).unwrap().all_mut());
        assert!(reason(&error.unwrap_err()).contains("rank 1 did not join"));
        let idle = idle.join().unwrap();
        let error = idle.broadcast(0, idle.device().zeros::<f32>(2).unwrap().all_mut()).unwrap_err();
        assert!(reason(&error).contains("`broadcast`"), "{error}");
    });
}

#[test]
fn mismatched_calls_are_rejected() {
    let found = together(2, |group| {
        let mut values = group.device().zeros::<f32>(4).unwrap();
        let done = if group.rank() == 0 {
            group.broadcast(0, values.view_mut(0..4))
        } else {
            group.broadcast(0, values.view_mut(0..3))
        };
        done.map_err(|error| reason(&error))
    });
    assert!(found.iter().all(Result::is_err), "{found:?}");
    assert!(
        found.iter().flat_map(|found| found.as_ref().err()).any(|text| text.contains("16 bytes")),
        "{found:?}"
    );
    let device = emulated();
    let id = DeviceGroupId::new(&device).unwrap();
    let refused = |bytes: &[u8]| {
        reason(
            &DeviceGroup::join(&device, &DeviceGroupId::from_bytes(bytes), 0, 2, Duration::from_millis(10))
                .unwrap_err(),
        )
    };
    for bytes in [&[][..], &[1, 2, 3], &[9]] {
        assert!(refused(bytes).contains("id is invalid"), "{bytes:?}");
    }
    std::thread::scope(|scope| {
        let first = scope.spawn(|| DeviceGroup::join(&device, &id, 1, 2, SOON).map(drop));
        let joined = DeviceGroup::join(&device, &id, 0, 2, SOON).unwrap();
        assert!(first.join().unwrap().is_ok());
        let error = DeviceGroup::join(&device, &id, 0, 2, SOON).unwrap_err();
        assert!(reason(&error).contains("rank 0 has joined already"), "{error}");
        let error = DeviceGroup::join(&device, &id, 2, 3, SOON).unwrap_err();
        assert!(reason(&error).contains("world size 2"), "{error}");
        drop(joined);
    });
}
