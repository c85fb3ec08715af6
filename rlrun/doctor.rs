//! `rlrun doctor`: the hardware and software of this machine that rlrun can use, and the reason for each that it cannot.
//!
//! With a recipe also what its archive allows.
//!
//! Invariant: it leaves nothing changed. Every missing part is listed with its remedy, and a machine that lacks a part is no
//! failure.

use std::fmt;

use device::inventory::{Gpu, Inventory, NCCL_REMEDY, inventory};
use serde_json::{Value, json};

use crate::archive::{self, ArchiveFindings, ArchiveRequest};
use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::memory;
use crate::program::Program;
use crate::recipe::Recipe;
#[cfg(feature = "postgres")]
use crate::run_database::DatabaseFindings;

/// The properties of the machine and of this program.
#[derive(Debug)]
struct Findings {
    cores: usize,
    /// Memory that is left, bytes; `None` on a system that does not say.
    memory: Option<usize>,
    devices: Inventory,
    built: Built,
    /// The database of the recipe, if there is one.
    #[cfg(feature = "postgres")]
    database: Option<DatabaseFindings>,
    /// Of the archive of a recipe, if it has one.
    archive: Option<ArchiveFindings>,
}

/// The features of this build.
#[derive(Clone, Copy, Debug)]
struct Built {
    cuda: bool,
    emulator: bool,
}

/// Looks, and says it.
///
/// # Errors
/// A recipe that is wrong.
pub(crate) fn run(args: &DoctorArgs, program: &Program) -> Result<String, Failure> {
    let recipe = args.recipe.as_ref().map(|path| Recipe::load(path, &args.sets, program)).transpose();
    let recipe = recipe.map_err(Failure::Recipe)?.map(|(recipe, _)| recipe);
    let findings = Findings {
        cores: model::thread_pool::available_cores(),
        memory: memory::available(),
        devices: inventory(),
        built: Built { cuda: cfg!(feature = "cuda"), emulator: cfg!(feature = "emulator") },
        #[cfg(feature = "postgres")]
        database: recipe.as_ref().and_then(|recipe| DatabaseFindings::of(recipe, program.environment())),
        archive: recipe.as_ref().and_then(|recipe| archive_of(recipe, program)),
    };
    Ok(if args.json { findings.json().to_string() } else { findings.to_string() })
}

/// Tries the archive of the recipe.
fn archive_of(recipe: &Recipe, program: &Program) -> Option<ArchiveFindings> {
    let url = recipe.archive()?;
    let (environment, patience) = (program.environment(), recipe.wait());
    Some(archive::examine(&ArchiveRequest { url: &url, environment, patience, from: None }))
}

impl Findings {
    fn json(&self) -> Value {
        let Inventory { driver, nccl, gpus, unusable, missing, .. } = &self.devices;
        let gpu = |gpu: &Gpu| {
            json!({
                "device": format!("cuda:{}", gpu.ordinal),
                "name": gpu.name,
                "compute_capability": capability(gpu),
                "free_bytes": gpu.free,
                "total_bytes": gpu.total,
            })
        };
        let broken =
            |(ordinal, why): &(usize, String)| json!({ "device": format!("cuda:{ordinal}"), "why": why });
        let findings = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "cores": self.cores,
            "free_bytes": self.memory,
            "archive": self.archive.as_ref().map(|archive| &archive.json),
            "devices": {
                "cuda_is_used": missing.is_empty(),
                "missing": missing,
                "driver_cuda_version": driver.map(version_of_cuda),
                "nccl_version": nccl.map(version_of_nccl),
                "gpus": gpus.iter().map(gpu).collect::<Vec<_>>(),
                "unusable": unusable.iter().map(broken).collect::<Vec<_>>(),
                "emulator": self.built.emulator,
            },
        });
        #[cfg(feature = "postgres")]
        if let Some(database) = &self.database {
            let mut findings = findings;
            findings["database"] = database.json();
            return findings;
        }
        findings
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inventory { driver, nccl, gpus, unusable, missing, .. } = &self.devices;
        writeln!(f, "rlrun {}\n", env!("CARGO_PKG_VERSION"))?;
        writeln!(f, "machine\n  {:10}  {}", "cores", self.cores)?;
        let free = self.memory.map_or_else(|| "unknown".to_owned(), |bytes| gibibytes(bytes as u64));
        writeln!(f, "  {:10}  {free} free\n\ndevices", "memory")?;
        let none = |what: Option<String>| what.unwrap_or_else(|| "not found".to_owned());
        let driver = none(driver.map(|version| format!("for CUDA {}", version_of_cuda(version))));
        let nccl = nccl.map(version_of_nccl).unwrap_or_else(|| {
            format!("not found; only several GPUs need it, such as those of `weights.transport = \"nccl\"`: {NCCL_REMEDY}")
        });
        // A binary without CUDA has not looked for the driver or NCCL.
        if self.built.cuda {
            writeln!(f, "  {:10}  {driver}\n  {:10}  {nccl}", "driver", "NCCL")?;
        }
        for gpu in gpus {
            let (name, capability) = (&gpu.name, capability(gpu));
            let (free, total) = (gibibytes(gpu.free), gibibytes(gpu.total));
            let place = format!("cuda:{}", gpu.ordinal);
            writeln!(f, "  {place:10}  {name}, compute capability {capability}, {free} of {total} free")?;
        }
        for (ordinal, why) in unusable {
            writeln!(f, "  {:10}  not usable: {why}", format!("cuda:{ordinal}"))?;
        }
        if missing.is_empty() {
            writeln!(f, "  {:10}  used where `[placement]` says so", "CUDA")?;
        } else {
            writeln!(f, "  {:10}  not used:", "CUDA")?;
            missing.iter().try_for_each(|why| writeln!(f, "  {:10}  - {why}", ""))?;
        }
        let emulator = match self.built.emulator {
            true => "there, for tests",
            false => "not there; it is for tests: build with `--features emulator`",
        };
        write!(f, "  {:10}  {emulator}", "emulator")?;
        #[cfg(feature = "postgres")]
        self.database.iter().try_for_each(|database| write!(f, "\n\ndatabase\n{database}"))?;
        let Some(archive) = &self.archive else { return Ok(()) };
        write!(f, "\n\narchive")?;
        archive.lines.iter().try_for_each(|(what, found)| write!(f, "\n  {what:15}  {found}"))
    }
}

/// 13.0 for 13000.
fn version_of_cuda(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// 2.28.9 for 22809.
fn version_of_nccl(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

fn capability(gpu: &Gpu) -> String {
    format!("{}.{}", gpu.capability.0, gpu.capability.1)
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(devices: Inventory, cuda: bool) -> Findings {
        Findings {
            cores: 8,
            memory: Some(3 << 30),
            devices,
            built: Built { cuda, emulator: false },
            #[cfg(feature = "postgres")]
            database: None,
            archive: None,
        }
    }

    #[test]
    fn a_build_without_cuda_says_so_and_what_helps() {
        let why = "this program was built without CUDA; build it with `--features cuda`";
        let there = Inventory { missing: vec![why.to_owned()], ..Inventory::default() };
        let expected = format!(
            "rlrun {}\n\nmachine\n  cores       8\n  memory      3.0 GiB free\n\ndevices\n  CUDA        not used:\n              \
             - {why}\n  emulator    not there; it is for tests: build with `--features emulator`",
            env!("CARGO_PKG_VERSION")
        );
        let findings = findings(there, false);
        assert_eq!(findings.to_string(), expected);
        let json = findings.json();
        assert_eq!(json["devices"]["cuda_is_used"], false);
        assert_eq!(json["devices"]["missing"][0], why);
        assert_eq!(json["devices"]["gpus"], json!([]));
    }

    #[test]
    fn gpus_are_shown_with_their_memory_and_libraries_with_their_versions() {
        let gpu = Gpu {
            ordinal: 1,
            name: "NVIDIA H200".to_owned(),
            capability: (9, 0),
            free: 130 << 30,
            total: 140 << 30,
        };
        let there =
            Inventory { driver: Some(13_010), nccl: Some(22_809), gpus: vec![gpu], ..Inventory::default() };
        let findings = findings(there, true);
        let text = findings.to_string();
        for line in [
            "  driver      for CUDA 13.1",
            "  NCCL        2.28.9",
            "  cuda:1      NVIDIA H200, compute capability 9.0, 130.0 GiB of 140.0 GiB free",
            "  CUDA        used where `[placement]` says so",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        let json = findings.json();
        assert_eq!(json["devices"]["gpus"][0]["device"], "cuda:1");
        assert_eq!(json["devices"]["nccl_version"], "2.28.9");
        assert_eq!(json["devices"]["cuda_is_used"], true);
    }

    #[test]
    fn a_gpu_that_cannot_be_used_does_not_hide_the_others() {
        let unusable = vec![(5, "CUDA_ERROR_OUT_OF_MEMORY: out of memory".to_owned())];
        let found = findings(Inventory { visible: 8, unusable, ..Inventory::default() }, true);
        let text = found.to_string();
        assert!(text.contains("cuda:5      not usable: CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
        assert!(text.contains("used where `[placement]` says so"), "{text}");
        assert_eq!(found.json()["devices"]["unusable"][0]["device"], "cuda:5");
    }

    #[test]
    fn every_piece_that_is_missing_has_a_line() {
        let missing = vec!["one; install it".to_owned(), "two; install it".to_owned()];
        let text = findings(Inventory { missing, ..Inventory::default() }, true).to_string();
        assert!(
            text.contains("  CUDA        not used:\n              - one; install it\n              - two;"),
            "{text}"
        );
        assert!(
            text.contains("  driver      not found\n  NCCL        not found; only several GPUs"),
            "{text}"
        );
    }
}
