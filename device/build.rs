//! Compiles the kernels for the CPU if the feature `emulator` is enabled.

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=emulator");
    #[cfg(feature = "emulator")]
    emulator();
}

/// Compiles all kernels and the emulator as one unit, so that the registry of kernels is linked.
#[cfg(feature = "emulator")]
fn emulator() {
    let mut kernels: Vec<_> = std::fs::read_dir("kernels")
        .expect("the kernels are beside this file")
        .map(|entry| entry.expect("a directory can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    kernels.sort();
    let mut unit = String::from("#include \"emulator.cc\"\n");
    for path in &kernels {
        let name = path.file_name().and_then(|name| name.to_str()).expect("names are ASCII");
        unit += &format!("#include \"{name}\"\n");
    }
    let path = std::path::Path::new(&out_dir()).join("unit.cc");
    std::fs::write(&path, unit).expect("the build directory can be written");
    let mut build = cc::Build::new();
    // Kernels call `fmaf` in their innermost loops; without the instruction each is a call of a library. Tests run where they are
    // built.
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("fma") && std::is_x86_feature_detected!("avx2") {
        build.flag("-mfma").flag("-mavx2");
    }
    build
        .cpp(true)
        .std("c++17")
        .file(path)
        .include("emulator")
        .include("kernels")
        .define("RLRUN_EMULATED", None)
        // Fortified longjmp rejects the switch between stacks.
        .flag("-U_FORTIFY_SOURCE")
        // No contraction: a product is rounded before an addition, unless a kernel asks for fma.
        .flag("-ffp-contract=off")
        .flag("-Wno-unknown-pragmas")
        .flag("-Wno-unused-function")
        .opt_level(2)
        .compile("rlrun_emulator");
}

/// Cargo's output directory.
#[cfg(feature = "emulator")]
#[expect(clippy::disallowed_methods, reason = "cargo tells build scripts by the environment")]
fn out_dir() -> String {
    std::env::var("OUT_DIR").expect("cargo sets it")
}
