//! CUDA graphs.

use device::{Matrix, MatrixMut};

use crate::common::devices;

#[test]
fn recorded_launches_run_at_replay() {
    for device in devices() {
        let (a, b) = (device.upload(&[2.0_f32]).unwrap(), device.upload(&[3.0_f32]).unwrap());
        let mut c = device.upload(&[1.0_f32]).unwrap();
        let mut add = || {
            let (a, b) = (Matrix::new(a.all(), 1), Matrix::new(b.all(), 1));
            device.product(a, b, MatrixMut::new(c.all_mut(), 1), 1.0, 1.0)
        };
        // Kernels have to be loaded before a capture.
        add().unwrap();
        let graph = device.record(add).unwrap();
        assert_eq!(device.download(c.all()).unwrap(), [7.0], "recorded, not done");
        for expected in [13.0, 19.0] {
            graph.replay().unwrap();
            assert_eq!(device.download(c.all()).unwrap(), [expected]);
        }
    }
}
