//! A program under Landlock and seccomp, for machines without user namespaces; and one under resource limits only.
//!
//! Invariant: under Landlock the program opens only readable files, starts no process and signals none, so that to kill it is to
//! kill all of it; the reaper does so if this process dies first. Landlock cannot hide names and sizes of files.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use ::landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};
use tempfile::TempDir;

use super::filter::{self, AllowedCalls};
use super::monitor::{ProgramPipes, monitor};
use super::readable::DEVICES;
use super::spawn::{Confinement, DialogPipes, arguments, spawn};
use super::{ProgramRun, ReadableFiles, SandboxError, SandboxJob, SandboxLimits};
use crate::reaper::Reaper;

/// Runs `job` under Landlock; its file is in a new directory under `scratch`, which is removed afterwards.
pub(super) fn run(
    readable: &ReadableFiles,
    scratch: &Path,
    job: SandboxJob<'_>,
    limits: &SandboxLimits,
    reaper: &Reaper,
) -> Result<ProgramRun, SandboxError> {
    let allowed = AllowedCalls { processes: false, signals: false };
    let directory = file_directory(scratch, &job)?;
    let mut paths = readable.paths();
    paths.extend(directory.as_ref().map(|directory| directory.path().to_path_buf()));
    let ruleset = ruleset(&paths).map_err(|error| SandboxError::Failed { reason: error.to_string() })?;
    let Some(ruleset) = ruleset else {
        return Err(SandboxError::Failed { reason: "the kernel has no Landlock".to_owned() });
    };
    let filter = filter::program(allowed);
    let confinement = Confinement { ruleset: Some(ruleset), filter, unprivileged: true };
    start(directory.as_ref(), "/", job, limits, reaper, confinement)
}

/// Runs `job` with all rights of its user.
pub(super) fn run_unconfined(
    scratch: &Path,
    job: SandboxJob<'_>,
    limits: &SandboxLimits,
    reaper: &Reaper,
) -> Result<ProgramRun, SandboxError> {
    let directory = match file_directory(scratch, &job)? {
        Some(directory) => directory,
        None => tempfile::Builder::new().prefix("program-").tempdir_in(scratch)?,
    };
    let working = directory.path().display().to_string();
    start(Some(&directory), &working, job, limits, reaper, Confinement::default())
}

/// A directory with the file of `job`.
fn file_directory(scratch: &Path, job: &SandboxJob<'_>) -> Result<Option<TempDir>, SandboxError> {
    let Some((name, contents)) = job.file else { return Ok(None) };
    let directory = tempfile::Builder::new().prefix("program-").tempdir_in(scratch)?;
    std::fs::write(directory.path().join(name), contents)?;
    Ok(Some(directory))
}

fn start(
    file_directory: Option<&TempDir>,
    working_directory: &str,
    job: SandboxJob<'_>,
    limits: &SandboxLimits,
    reaper: &Reaper,
    confinement: Confinement,
) -> Result<ProgramRun, SandboxError> {
    let file = job
        .file
        .zip(file_directory)
        .map(|((name, _), directory)| directory.path().join(name).display().to_string());
    let dialog = DialogPipes::open(&job)?;
    let argv = arguments(&job, file.as_deref(), dialog.as_ref());
    let (program, rest) = argv
        .split_first()
        .ok_or_else(|| SandboxError::Failed { reason: "the command is empty".to_owned() })?;
    let mut command = Command::new(program);
    command.args(rest).current_dir(working_directory).env_clear();
    command.envs(job.environment.iter().map(|(name, value)| (name, value)));
    let inherited: Vec<&OwnedFd> =
        dialog.iter().flat_map(|pipes| [&pipes.orders.theirs, &pipes.report.theirs]).collect();
    // From here on exec has succeeded: the standard library reports its failure through a pipe.
    let child = spawn(command, &inherited, limits, reaper, confinement)
        .map_err(|error| SandboxError::Failed { reason: format!("{program}: {error}") })?;
    monitor(child, job, limits, ProgramPipes { dialog, status: None, supervisor: None })
}

/// Rules that allow to read and run `readable`, to use the devices, and to open no other file. Landlock's third version is the
/// minimum: earlier ones cannot forbid to truncate files.
fn ruleset(readable: &[PathBuf]) -> Result<Option<OwnedFd>, RulesetError> {
    let devices = DEVICES.iter().filter_map(|device| PathFd::new(device).ok());
    let devices = devices.map(|device| {
        Ok::<_, RulesetError>(PathBeneath::new(device, AccessFs::ReadFile | AccessFs::WriteFile))
    });
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V3))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V6))?
        .handle_access(AccessNet::from_all(ABI::V6))?
        .scope(Scope::from_all(ABI::V6))?
        .create()?
        .add_rules(path_beneath_rules(readable, AccessFs::from_read(ABI::V3)))?
        .add_rules(devices)?;
    Ok(ruleset.into())
}
