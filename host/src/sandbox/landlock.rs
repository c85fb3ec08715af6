//! A program under Landlock and seccomp, for machines without user namespaces; and one under limits only.
//!
//! Invariant: under Landlock it opens nothing but the paths of its view, read-only, starts no process and signals none, so
//! that killing it kills all of it; the reaper does so if this process dies first. It does not hide names and sizes of files, which Landlock cannot do.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use ::landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};
use tempfile::TempDir;

use super::filter::{self, AllowedCalls};
use super::spawn::{Confinement, Talk, arguments, spawn};
use super::view::DEVICES;
use super::watch::{Ends, watch};
use super::{Job, Limits, Ran, SandboxError, View};
use crate::reaper::Reaper;

/// Runs `job` under Landlock; its file lies in a directory of its own under `scratch`, removed afterwards.
pub(super) fn run(
    view: &View,
    scratch: &Path,
    job: Job<'_>,
    limits: (&Limits, &Reaper),
) -> Result<Ran, SandboxError> {
    let allowed = AllowedCalls { processes: false, signals: false };
    let place = place(scratch, &job)?;
    let mut readable = view.paths();
    readable.extend(place.as_ref().map(|place| place.path().to_path_buf()));
    let ruleset = ruleset(&readable).map_err(|error| SandboxError::Failed { reason: error.to_string() })?;
    let Some(ruleset) = ruleset else {
        return Err(SandboxError::Failed { reason: "the kernel has no Landlock".to_owned() });
    };
    let filter = filter::program(allowed);
    let confinement = Confinement { ruleset: Some(ruleset), filter, unprivileged: true };
    start(place.as_ref(), "/", job, limits, confinement)
}

/// Runs `job` with all that its user may do.
pub(super) fn run_unconfined(
    scratch: &Path,
    job: Job<'_>,
    limits: (&Limits, &Reaper),
) -> Result<Ran, SandboxError> {
    let place = match place(scratch, &job)? {
        Some(place) => place,
        None => tempfile::Builder::new().prefix("program-").tempdir_in(scratch)?,
    };
    let directory = place.path().display().to_string();
    start(Some(&place), &directory, job, limits, Confinement::default())
}

/// A directory with the file of `job`.
fn place(scratch: &Path, job: &Job<'_>) -> Result<Option<TempDir>, SandboxError> {
    let Some((name, contents)) = job.file else { return Ok(None) };
    let place = tempfile::Builder::new().prefix("program-").tempdir_in(scratch)?;
    std::fs::write(place.path().join(name), contents)?;
    Ok(Some(place))
}

fn start(
    place: Option<&TempDir>,
    directory: &str,
    job: Job<'_>,
    limits: (&Limits, &Reaper),
    confinement: Confinement,
) -> Result<Ran, SandboxError> {
    let file = job.file.zip(place).map(|((name, _), place)| place.path().join(name).display().to_string());
    let talk = Talk::open(&job)?;
    let argv = arguments(&job, file.as_deref(), talk.as_ref());
    let (program, rest) = argv
        .split_first()
        .ok_or_else(|| SandboxError::Failed { reason: "the command is empty".to_owned() })?;
    let mut command = Command::new(program);
    command.args(rest).current_dir(directory).env_clear();
    command.envs(job.environment.iter().map(|(name, value)| (name, value)));
    let inherited: Vec<&OwnedFd> =
        talk.iter().flat_map(|talk| [&talk.orders.theirs, &talk.report.theirs]).collect();
    // That exec succeeded is known from here on: the standard library hears of a failure through a pipe.
    let child = spawn(command, &inherited, limits, confinement)
        .map_err(|error| SandboxError::Failed { reason: format!("{program}: {error}") })?;
    watch(child, job, limits.0, Ends { talk, status: None, warden: None })
}

/// Rules under which `readable` can be read and run, devices be used, and nothing else be opened. The third version of
/// Landlock is the least, since before it files could be truncated by anybody.
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
