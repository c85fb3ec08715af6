//! Buffers, views, copies, and who holds how much.

use device::device::Place;
use device::{Device, DeviceError, bf16};

use crate::common::{devices, noise};

#[test]
fn what_goes_up_comes_down() {
    for device in devices() {
        let values = noise(1000, 1);
        let mut buffer = device.upload(&values).unwrap();
        assert_eq!(device.download(buffer.view(10..20)).unwrap(), values[10..20]);
        let other = device.upload(&values[..5]).unwrap();
        device.copy(other.all(), buffer.view_mut(100..105)).unwrap();
        device.clear(buffer.view_mut(0..3)).unwrap();
        let found = device.download(buffer.all()).unwrap();
        assert_eq!(found[..3], [0.0; 3]);
        assert_eq!(found[100..105], values[..5]);
        assert_eq!(found[105..], values[105..]);
        assert!(device.download(device.zeros::<bf16>(0).unwrap().all()).unwrap().is_empty());
    }
}

#[test]
fn what_is_too_large_is_refused_with_those_who_have_the_memory() {
    for device in devices() {
        let cache = device.labelled("key-value cache").uninit::<u8>(64 << 20).unwrap();
        let total = device.memory().unwrap().1 as usize;
        let error = device.labelled("activations").uninit::<u8>(total + 1).unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("key-value cache (64.0 MiB)"), "{text}");
        assert!(text.contains("microbatch_tokens"), "{text}");
        assert_eq!(device.held().0, [("key-value cache", 64 << 20)]);
        drop(cache);
        assert!(device.held().0.is_empty());
    }
}

#[test]
fn shared_memory_is_seen_by_who_opens_it() {
    for device in devices() {
        let Ok(other) = Device::open(Place::Emulated) else { continue };
        if device.name() != "emulated" {
            // A process cannot open its own memory of a GPU; two processes do in the tests of the transports.
            continue;
        }
        let values = noise(5000, 2);
        let mut buffer = device.shared::<f32>(values.len()).unwrap();
        device.upload_to(&values, buffer.all_mut()).unwrap();
        let opened = other.open_shared::<f32>(&buffer.handle().unwrap(), values.len()).unwrap();
        assert_eq!(other.download(opened.all()).unwrap(), values);
        assert!(device.zeros::<f32>(4).unwrap().handle().is_err(), "it was not made to be shared");
    }
}

#[test]
fn a_device_that_is_not_there_says_what_is_missing() {
    let error = Device::open(Place::Cuda(63)).unwrap_err().to_string();
    assert!(error.contains("cuda:63 cannot be used"), "{error}");
    let remedy =
        ["--features cuda", "install", "CUDA_VISIBLE_DEVICES"].iter().any(|word| error.contains(word));
    assert!(remedy, "{error}");
}
