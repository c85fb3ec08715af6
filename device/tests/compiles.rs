//! Compiles the kernels with nvrtc. Needs no GPU; `tests/run` installs nvrtc where Python is available.

use device::inventory::compile_kernels;

/// The architecture that the kernels are tuned for: Hopper.
const CAPABILITY: i32 = 90;

#[test]
#[ignore = "needs libnvrtc; tests/run installs it"]
fn all_kernels_compile() {
    compile_kernels(CAPABILITY).unwrap();
}
