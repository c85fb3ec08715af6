//! Whether NVIDIA's compiler takes the kernels. It needs no GPU; `tests/run` brings it where Python is.

use device::inventory::compile_kernels;

/// The architecture that the kernels are tuned for: Hopper.
const CAPABILITY: i32 = 90;

#[test]
#[ignore = "needs libnvrtc; tests/run installs it"]
fn the_compiler_takes_all_kernels() {
    compile_kernels(CAPABILITY).unwrap();
}
