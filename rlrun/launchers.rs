//! Slurm, Kubernetes, SkyPilot, Ray, torchrun and MPI: programs that start rlrun on several machines.
//!
//! ```text
//! rlrun launch NAME RECIPE   writes what the launcher reads, and gives it to the launcher
//! rlrun RECIPE --by-rank     every process of the launcher: the first is the run, the others join it
//! ```
//!
//! - [`variables`]: the rank and the first host, in the variables that a launcher sets; [`network`]: the addresses of this machine
//! - [`slurm`], [`kubernetes`], [`skypilot`], [`ray`]: their files; [`manifest`]: YAML
//!
//! Invariant: nothing of a run passes through a launcher; it starts processes, and starts them again after status 75.

pub(crate) mod kubernetes;
mod manifest;
pub(crate) mod network;
pub(crate) mod ray;
pub(crate) mod skypilot;
pub(crate) mod slurm;
pub(crate) mod variables;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::args::LaunchArgs;
use crate::failure::Failure;
use crate::program::Program;
use crate::recipe::{Origins, Recipe};
use crate::run_dir;

/// Port of a run that a launcher has started.
pub(crate) const PORT: u16 = 8700;
/// Seconds that a worker waits for its run, such as while that is in a queue, before it ends with status 75.
const PATIENCE_S: u64 = 3600;

/// The recipe of a run that workers join, which therefore has an address.
#[derive(Debug)]
pub(crate) struct ServedRecipe {
    /// The recipe.
    pub(crate) recipe: Recipe,
    /// Where its values come from.
    pub(crate) origins: Origins,
    /// The changes to its file; the first gives an address if nothing else does.
    pub(crate) sets: Vec<String>,
}

impl ServedRecipe {
    /// Reads the recipe file `path`, changed by `sets`.
    ///
    /// # Errors
    /// What is wrong with the recipe.
    pub(crate) fn load(path: &Path, sets: Vec<String>, program: &Program) -> Result<Self, Failure> {
        let load = |sets: Vec<String>| {
            let (recipe, origins) = Recipe::load(path, &sets, program)?;
            Ok(Self { recipe, origins, sets })
        };
        let address = format!("buffer.listen=\"{}\"", SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)));
        let with_address = [vec![address], sets.clone()].concat();
        match load(sets) {
            Ok(served) if served.recipe.buffer.listen.is_some() => Ok(served),
            Ok(_) => load(with_address).map_err(Failure::Recipe),
            // What is wrong may be that there is no address.
            Err(mistakes) => load(with_address).map_err(|_| Failure::Recipe(mistakes)),
        }
    }
}

/// What a launcher starts.
#[derive(Debug)]
pub(crate) struct LaunchPlan {
    /// The program on the machines of the run.
    pub(crate) program: String,
    /// The recipe file.
    pub(crate) recipe: PathBuf,
    /// The recipe with every value written out.
    pub(crate) resolved: String,
    /// Changes to the recipe file.
    sets: Vec<String>,
    /// Name of the run.
    pub(crate) name: String,
    /// The run directory.
    pub(crate) run_dir: PathBuf,
    /// Ranks of the trainer that join the run.
    pub(crate) trainer_ranks: usize,
    /// Samplers that join the run.
    pub(crate) rollout_workers: usize,
    /// Port on which the run listens.
    pub(crate) port: u16,
    /// GPUs of each machine.
    pub(crate) gpus: usize,
    /// Cores of each process.
    pub(crate) cpus: Option<usize>,
}

impl LaunchPlan {
    /// The plan for `args`, with this program or one that is `installed` where the run is. The recipe is checked.
    ///
    /// # Errors
    /// A recipe that is wrong; paths that cannot be made absolute.
    pub(crate) fn new(
        args: &LaunchArgs,
        program: &Program,
        installed: Option<&str>,
    ) -> Result<Self, Failure> {
        let run = &args.run;
        let served = ServedRecipe::load(&run.recipe.recipe, run.sets(), program)?;
        let ServedRecipe { recipe, origins, sets } = served;
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|source| Failure::System {
                what: format!("find the directory of {}", path.display()),
                source,
            })
        };
        let own = std::env::current_exe().map_err(|source| Failure::System {
            what: "find the program that is running".to_owned(),
            source,
        })?;
        Ok(Self {
            program: args
                .program
                .clone()
                .or(installed.map(str::to_owned))
                .unwrap_or_else(|| own.display().to_string()),
            recipe: absolute(&run.recipe.recipe)?,
            resolved: recipe.resolved_toml(&origins),
            sets,
            run_dir: absolute(&run_dir::place(run.run_dir.as_deref(), &recipe.name))?,
            trainer_ranks: recipe.ranks_that_join(),
            rollout_workers: args.rollout_workers,
            gpus: args.gpus,
            cpus: args.cpus,
            port: recipe.buffer.listen.map_or(PORT, |listen| listen.port()),
            name: recipe.name,
        })
    }

    /// The command of the run, on a machine where `recipe` and `run_dir` are its paths.
    pub(crate) fn lead(&self, recipe: &str, run_dir: &str, interface: Option<&str>) -> Vec<String> {
        let mut command =
            words(&[&self.program, recipe, "--resume-or-start", "--quiet", "--run-dir", run_dir]);
        command.extend(interface.into_iter().flat_map(|name| words(&["--interface", name])));
        command
    }

    /// The command of a sampler.
    pub(crate) fn rollout(&self, recipe: &str, join: &str) -> Vec<String> {
        let patience = PATIENCE_S.to_string();
        words(&[
            &self.program,
            "worker",
            "rollout",
            "--join",
            join,
            "--patience",
            &patience,
            "--recipe",
            recipe,
        ])
    }

    /// The command of a further rank of the trainer, among processes of which each is one.
    pub(crate) fn trainer(&self, join: &str) -> Vec<String> {
        let patience = PATIENCE_S.to_string();
        words(&[
            &self.program,
            "worker",
            "trainer",
            "--join",
            join,
            "--patience",
            &patience,
            "--rank-offset",
            "1",
        ])
    }

    /// The arguments that change the recipe file, for commands that read it.
    pub(crate) fn sets(&self) -> Vec<String> {
        self.sets.iter().flat_map(|set| words(&["--set", set])).collect()
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// A command for a shell: words with anything but letters, digits and `_-./=:,@%+` are quoted.
pub(crate) fn shell(command: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,@%+".contains(c);
    let quoted = command.iter().map(|word| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_a_program_as_they_are() {
        let command = words(&["printf", "%s|", "a b", "it's", "$(x)", "", "k=\"v\"", "\n"]);
        let shown = std::process::Command::new("sh").args(["-c", &shell(&command)]).output().unwrap();
        assert_eq!(String::from_utf8(shown.stdout).unwrap(), "a b|it's|$(x)||k=\"v\"|\n|");
    }
}
