//! What a program adds to every recipe: its kinds of rewards, and the variables of its process.
//!
//! Invariant: only [`main`] reads arguments and environment variables. It prints every error once and chooses the exit
//! status: 0 success, 1 the run failed, 2 the input was wrong, 75 start it again.

use std::collections::BTreeMap;
use std::env::ArgsOs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use environments::EnvironmentRegistry;
use rewards::Registry;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::args::Cli;
use crate::commands;
use crate::failpoints;
use crate::failure::Failure;

/// Variables that begin so change values of a recipe.
pub(crate) const OVERRIDE: &str = "RLRUN__";

/// Files that a process may have open; the second if the system refuses the first, as macOS does by default.
const MOST_FILES: [u64; 2] = [16_384, 10_240];

/// The context in which a recipe is loaded and run.
#[derive(Clone, Default)]
pub struct Program {
    registry: Registry,
    environments: EnvironmentRegistry,
    environment: Arc<BTreeMap<String, String>>,
}

/// Without the values of the environment: secrets are among them.
impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").field("registry", &self.registry).finish_non_exhaustive()
    }
}

impl Program {
    /// A program that knows the kinds of `registry` and was started with these variables.
    pub fn new(registry: Registry, environment: impl IntoIterator<Item = (String, String)>) -> Self {
        let environment = Arc::new(environment.into_iter().collect());
        Self { registry, environments: EnvironmentRegistry::default(), environment }
    }

    /// The same program with these kinds of environments.
    #[must_use]
    pub fn with_environments(self, environments: EnvironmentRegistry) -> Self {
        Self { environments, ..self }
    }

    /// The kinds of rewards that a recipe can name.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The kinds of environments that a recipe can name.
    #[must_use]
    pub fn environments(&self) -> &EnvironmentRegistry {
        &self.environments
    }

    /// This program without the variables that override recipe keys.
    #[must_use]
    pub fn without_overrides(&self) -> Self {
        let kept = self.environment.iter().filter(|(name, _)| !name.starts_with(OVERRIDE));
        let environment = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
        Self { environment: Arc::new(environment), ..self.clone() }
    }

    /// The variables of the process.
    #[must_use]
    pub fn environment(&self) -> &Arc<BTreeMap<String, String>> {
        &self.environment
    }
}

/// How a program of rlrun starts.
#[derive(Debug)]
pub struct Entry<'a> {
    /// The kinds of rewards that a recipe can name.
    pub registry: Registry,
    /// The kinds of environments that a recipe can name.
    pub environments: EnvironmentRegistry,
    /// Arguments with which this program calls [`model::chat::serve`], in a process for chat templates.
    pub templates: &'a [&'a str],
}

/// The whole command line of `rlrun`, for a program with rewards of its own in `registry`.
#[must_use]
pub fn main(registry: Registry) -> ExitCode {
    main_with(registry, EnvironmentRegistry::default())
}

/// [`main`] for a program with environments of its own too.
#[must_use]
pub fn main_with(registry: Registry, environments: EnvironmentRegistry) -> ExitCode {
    let entry = Entry { registry, environments, templates: &["worker", "templates"] };
    run(entry, Cli::parse_args, commands::execute)
}

/// Parses the arguments of the process, executes the command and prints its text or its error.
pub fn run<A>(
    entry: Entry<'_>,
    parse: impl FnOnce(ArgsOs) -> Result<A, clap::Error>,
    execute: impl FnOnce(&A, &Program) -> Result<String, Failure>,
) -> ExitCode {
    let args = match parse(std::env::args_os()) {
        Ok(args) => args,
        Err(message) => message.exit(),
    };
    // A value that is not UTF-8 is shown as far as it can be, in the error that it causes.
    let text = |raw: std::ffi::OsString| raw.to_string_lossy().into_owned();
    let environment = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
    let program = Program::new(entry.registry, environment).with_environments(entry.environments);
    allow_files();
    if let Some(directory) = cache(program.environment()) {
        device::inventory::keep_kernels_in(directory.join("rlrun").join("kernels"));
    }
    // Linux keeps the file of a running binary that was replaced; elsewhere the path has to do.
    let own = if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() };
    if let Ok(own) = own {
        model::chat::render_apart(own, entry.templates);
    }
    let armed = program.environment().get(failpoints::VARIABLE).map_or(Ok(()), |text| failpoints::arm(text));
    match armed.and_then(|()| execute(&args, &program)) {
        Ok(text) => {
            if !text.is_empty() {
                print(&text);
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            // A diagnostic of the recipe says itself that it is one, and what should be started again has not failed.
            let label =
                if matches!(error, Failure::Recipe(_) | Failure::Requeue(_)) { "" } else { "error: " };
            if !matches!(error, Failure::ChildFailed(_)) {
                eprintln!("{label}{error}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Raises the number of files that this process may have open: shells of macOS allow 256, and a process of an environment needs two.
fn allow_files() {
    let limit = getrlimit(Resource::Nofile);
    for files in MOST_FILES {
        let files = limit.maximum.map_or(files, |maximum| maximum.min(files));
        if limit.current.is_none_or(|current| current >= files)
            || setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum: limit.maximum }).is_ok()
        {
            return;
        }
    }
}

/// Where programs of this user keep what they can make again: `XDG_CACHE_HOME`, which counts if it is absolute, or `~/.cache`.
fn cache(environment: &BTreeMap<String, String>) -> Option<PathBuf> {
    let absolute = |name: &str| environment.get(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
}

/// Prints to standard output; a closed pipe (`rlrun plan R | head`) is no error.
fn print(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_user_says_or_at_home() {
        let at = |variables: &[(&str, &str)]| {
            cache(&variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
        };
        let home = ("HOME", "/home/a");
        assert_eq!(at(&[home]), Some(PathBuf::from("/home/a/.cache")));
        assert_eq!(at(&[home, ("XDG_CACHE_HOME", "/var/c")]), Some(PathBuf::from("/var/c")));
        assert_eq!(at(&[home, ("XDG_CACHE_HOME", "relative")]), Some(PathBuf::from("/home/a/.cache")));
        assert_eq!(at(&[]), None);
    }
}
