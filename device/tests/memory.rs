//! Buffers, views, copies, and memory accounting.

use device::device::DeviceLocation;
use device::{Device, DeviceError, bf16};

use crate::common::{devices, noise};

#[test]
fn upload_and_download_round_trip() {
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
fn an_allocation_error_names_the_largest_users() {
    for device in devices() {
        let cache = device.labelled("key-value cache").uninit::<u8>(64 << 20).unwrap();
        let total = device.memory().unwrap().1 as usize;
        let error = device.labelled("activations").uninit::<u8>(total + 1).unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("key-value cache (64.0 MiB)"), "{text}");
        assert!(text.contains("microbatch_tokens"), "{text}");
        assert_eq!(device.memory_usage().0, [("key-value cache", 64 << 20)]);
        drop(cache);
        assert!(device.memory_usage().0.is_empty());
    }
}

#[test]
fn shared_memory_is_visible_to_its_opener() {
    for device in devices() {
        let Ok(other) = Device::open(DeviceLocation::Emulated) else { continue };
        if device.name() != "emulated" {
            // A process cannot open its own GPU memory by IPC; the transport tests use two processes.
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
fn opening_a_missing_device_says_what_is_missing() {
    let error = Device::open(DeviceLocation::Cuda(63)).unwrap_err().to_string();
    assert!(error.contains("cuda:63 cannot be used"), "{error}");
    let remedy =
        ["--features cuda", "install", "CUDA_VISIBLE_DEVICES"].iter().any(|word| error.contains(word));
    assert!(remedy, "{error}");
}
