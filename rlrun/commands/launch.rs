//! `rlrun launch`: what a launcher reads, printed or given to it.
//!
//! Invariant: nothing is submitted before the recipe was checked. Secrets go to a launcher as files or as a secret, and never
//! into a command line or a manifest.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::args::{KubernetesArgs, LaunchCommand, RayArgs, SkypilotArgs, SlurmArgs};
use crate::credentials::Credentials;
use crate::failure::Failure;
use crate::launchers::{LaunchPlan, kubernetes, ray, skypilot, slurm};
use crate::program::Program;

/// The program in images and on machines that install it.
const INSTALLED: &str = "rlrun";

/// What was printed or submitted.
pub(super) fn launch(command: &LaunchCommand, program: &Program) -> Result<String, Failure> {
    match command {
        LaunchCommand::Slurm(args) => on_slurm(args, program),
        LaunchCommand::Kubernetes(args) => on_kubernetes(args, program),
        LaunchCommand::Skypilot(args) => on_skypilot(args, program),
        LaunchCommand::Ray(args) => on_ray(args, program),
    }
}

fn on_slurm(args: &SlurmArgs, program: &Program) -> Result<String, Failure> {
    let plan = LaunchPlan::new(&args.launch, program, None)?;
    let script = slurm::script(&plan, args);
    if args.launch.dry_run {
        return Ok(script);
    }
    if let Some(parent) = plan.run_dir.parent() {
        make(parent)?;
    }
    let said = submit(Command::new("sbatch"), Some(&script), "Slurm's client programs")?;
    Ok(format!("{said}\nthe run: {0}\nits log: {0}-JOB.log", plan.run_dir.display()))
}

fn on_kubernetes(args: &KubernetesArgs, program: &Program) -> Result<String, Failure> {
    let plan = LaunchPlan::new(&args.launch, program, Some(INSTALLED))?;
    let manifest = kubernetes::manifest(&plan, args);
    if args.launch.dry_run {
        return Ok(manifest);
    }
    let files = files(args.files.as_deref(), &plan);
    let credentials = made(&files)?;
    let kubectl = || {
        let mut command = Command::new("kubectl");
        command.args(args.namespace.iter().flat_map(|namespace| ["--namespace", namespace]));
        command
    };
    let mut secret = kubectl();
    secret.args([
        "create",
        "secret",
        "generic",
        &kubernetes::secret(&plan),
        "--dry-run=client",
        "--output=yaml",
    ]);
    secret.args(credentials.iter().map(|file| format!("--from-file={}", file.display())));
    let secret = submit(secret, None, "kubectl")?;
    let mut apply = kubectl();
    apply.args(["apply", "--filename=-"]);
    submit(apply, Some(&format!("{secret}\n---\n{manifest}")), "kubectl")
}

fn on_skypilot(args: &SkypilotArgs, program: &Program) -> Result<String, Failure> {
    if args.launch.gpus > 0 {
        return Err(Failure::Argument(
            "SkyPilot chooses machines by their accelerator: name it with --accelerators, such as H100:1, instead of --gpus"
                .to_owned(),
        ));
    }
    let plan = LaunchPlan::new(&args.launch, program, Some(INSTALLED))?;
    let files = files(args.files.as_deref(), &plan);
    let recipe = files.join("recipe.toml");
    let task = skypilot::task(&plan, args, &recipe, &Credentials::of_run(&files));
    if args.launch.dry_run {
        return Ok(task);
    }
    made(&files)?;
    write(&recipe, &plan.resolved)?;
    let file = files.join("task.yaml");
    write(&file, &task)?;
    let mut sky = Command::new("sky");
    sky.args(["jobs", "launch", "--yes", "--detach-run", "--name", &plan.name]).arg(&file);
    submit(sky, None, "SkyPilot (pip install skypilot)")
}

fn on_ray(args: &RayArgs, program: &Program) -> Result<String, Failure> {
    let plan = LaunchPlan::new(&args.launch, program, None)?;
    let processes = ray::processes(&plan, args);
    if args.launch.dry_run {
        return Ok(processes);
    }
    let directory = super::scratch_directory()?;
    write(&directory.path().join(ray::RECIPE), &plan.resolved)?;
    write(&directory.path().join("processes.json"), &processes)?;
    write(&directory.path().join("rlrun_ray.py"), ray::DRIVER)?;
    let mut job = Command::new("ray");
    job.args(["job", "submit"]);
    job.args(args.address.iter().flat_map(|address| ["--address", address]));
    job.args(["--no-wait", "--working-dir"]).arg(directory.path());
    job.args(["--", "python", "rlrun_ray.py", "processes.json"]);
    submit(job, None, "Ray (pip install \"ray[default]\")")
}

/// The directory for the recipe and the credentials of a run on this machine.
fn files(named: Option<&Path>, plan: &LaunchPlan) -> PathBuf {
    let mut beside = plan.run_dir.clone().into_os_string();
    beside.push(".launch");
    named.map_or_else(|| beside.into(), Path::to_path_buf)
}

/// Makes the credentials of a run in `files`, if they are not there; returns their files.
fn made(files: &Path) -> Result<[PathBuf; 3], Failure> {
    let credentials = Credentials::of_run(files);
    credentials.tokens()?;
    credentials.authority()?;
    Ok(credentials.files())
}

fn make(directory: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(directory)
        .map_err(|source| Failure::System { what: format!("make {}", directory.display()), source })
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text)
        .map_err(|source| Failure::System { what: format!("write {}", path.display()), source })
}

/// Runs a launcher's client with `input`; returns what it printed.
fn submit(mut command: Command, input: Option<&str>, package: &str) -> Result<String, Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |source| Failure::System { what: format!("start {name}; this needs {package}"), source };
    let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
    let mut child = command.stdin(stdin).stdout(Stdio::piped()).spawn().map_err(failed)?;
    if let Some((mut pipe, input)) = child.stdin.take().zip(input) {
        // A client that ends without reading says why.
        drop(pipe.write_all(input.as_bytes()));
    }
    let output = child.wait_with_output().map_err(failed)?;
    if !output.status.success() {
        return Err(Failure::Argument(format!(
            "{name} did not accept it ({}); --dry-run shows what it was given",
            output.status
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}
