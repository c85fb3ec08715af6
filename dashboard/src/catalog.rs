//! All runs of a page, kept up to date by one task.
//!
//! Invariant: files are read by this task and by requests for samples and recipes alone; streams are notified of the
//! newest state and never queue older ones.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::run::ShownRun;
use crate::why::{Advisor, SerialAdvisor};

/// Interval between two looks at the files, milliseconds; a change is announced within a second.
const POLL_INTERVAL: Duration = Duration::from_millis(400);

/// The runs of a page.
pub(crate) struct RunCatalog {
    runs: Vec<ShownRun>,
    /// Recommends changes; `None` for a page of another program than rlrun.
    advisor: Option<SerialAdvisor>,
}

impl fmt::Debug for RunCatalog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunCatalog").field("runs", &self.runs).finish_non_exhaustive()
    }
}

impl RunCatalog {
    /// The runs of these directories, read once.
    pub(crate) fn open(roots: &[PathBuf]) -> Self {
        let mut runs: Vec<ShownRun> = Vec::new();
        for root in roots {
            let name = name_of(root);
            let taken = |name: &str| runs.iter().any(|run| run.name() == name);
            let numbered = (2..).map(|number| format!("{name} ({number})"));
            let name = std::iter::once(name.clone()).chain(numbered).find(|name| !taken(name));
            runs.push(ShownRun::new(name.unwrap_or_default(), root));
        }
        let catalog = Self { runs, advisor: None };
        catalog.refresh();
        catalog
    }

    /// The same, with recommendations of `advisor`.
    pub(crate) fn advised_by(self, advisor: Option<Advisor>) -> Self {
        Self { advisor: advisor.map(SerialAdvisor::new), ..self }
    }

    /// What recommends changes.
    pub(crate) fn advisor(&self) -> Option<&SerialAdvisor> {
        self.advisor.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ShownRun> {
        self.runs.iter()
    }

    /// The run of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&ShownRun> {
        self.runs.iter().find(|run| run.name() == name)
    }

    /// Whether a file has a part that the next look reads.
    fn behind(&self) -> bool {
        self.runs.iter().any(|run| run.root().is_dir() && run.timeline().behind())
    }

    /// State and values of all runs.
    pub(crate) fn describe(&self) -> Vec<Value> {
        let now = SystemTime::now();
        self.runs.iter().map(|run| run.contents().describe(run.name(), now)).collect()
    }

    /// Reads all parts of long files.
    pub(crate) fn catch_up(&self) {
        while self.behind() {
            self.refresh();
        }
    }

    /// Reads what is new. Returns the revision of every run, by name.
    fn refresh(&self) -> Map<String, Value> {
        self.runs.iter().map(|run| (run.name().to_owned(), run.refresh().into())).collect()
    }
}

/// Looks at the files until it is aborted, and announces the revisions after every change.
pub(crate) async fn follow(catalog: Arc<RunCatalog>, revisions: watch::Sender<Map<String, Value>>) {
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut behind = false;
    loop {
        // A long file is read in parts without a pause.
        if !behind {
            ticks.tick().await;
        }
        let catalog = Arc::clone(&catalog);
        // A file system may be slow.
        let look = tokio::task::spawn_blocking(move || (catalog.refresh(), catalog.behind()));
        let Ok((new, more)) = look.await else {
            // A panic was printed; the next look reads on.
            behind = false;
            continue;
        };
        behind = more;
        revisions.send_if_modified(|old| {
            let changed = *old != new;
            *old = new;
            changed
        });
    }
}

/// The last part of a path.
fn name_of(root: &Path) -> String {
    let absolute = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
    let name = absolute.file_name().map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| root.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let directory = tempfile::tempdir().unwrap();
        let roots = ["a/run", "b/run", "c/run (2)"].map(|name| directory.path().join(name));
        roots.iter().for_each(|root| std::fs::create_dir_all(root).unwrap());
        let catalog = RunCatalog::open(&roots);
        let names: Vec<&str> = catalog.iter().map(ShownRun::name).collect();
        assert_eq!(names, ["run", "run (2)", "run (2) (2)"]);
        assert_eq!(catalog.get("run (2)").unwrap().root(), roots[1]);
        assert!(catalog.get("none").is_none());
    }
}
