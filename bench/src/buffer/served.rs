//! `rlrun serve buffer` in a child process, on a separate port.
//!
//! Invariant: dropping the value kills the child with SIGKILL; the next child opens the files that it leaves.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rlrun::failure::Failure;
use rlrun::memory;

/// A server in a separate process.
#[derive(Debug)]
pub struct Served {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
    /// From the start of the process until it listened, the journal open.
    pub opened_in: Duration,
}

impl Served {
    /// Serves the journal in `directory`, or a new schema of `database`; its capacity is so large that no writer waits for
    /// back-pressure.
    ///
    /// # Errors
    /// A child that does not start or does not listen; its reason is on standard error.
    pub fn start(directory: &Path, database: Option<&str>) -> Result<Self, Failure> {
        let system = |source| Failure::System { what: "start `rlrun serve buffer`".to_owned(), source };
        let program = std::env::current_exe().map_err(system)?;
        let started = Instant::now();
        let mut command = Command::new(program);
        command.arg("serve-buffer");
        if let Some(url) = database {
            let schema = format!("rlrun_bench_{}", std::process::id());
            command.args(["--postgres", url, "--schema", &schema]);
        }
        let mut child = command
            .args(["--listen", "127.0.0.1:0", "--max-bytes", "64GiB", "--quiet"])
            .args(["--batch-groups", "65536", "--max-staleness", "255", "--dir"])
            .arg(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(system)?;
        let mut line = String::new();
        // A failing child closes its output, so that the read returns.
        let read = child.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
        let opened_in = started.elapsed();
        read.transpose().map_err(system)?;
        match line.trim_end().strip_prefix("listening on http://").and_then(|address| address.parse().ok()) {
            Some(address) => Ok(Self { child, address, opened_in }),
            None => {
                // It has ended or makes no sense.
                let _ = child.kill();
                let _ = child.wait();
                Err(Failure::NotThere(format!("`rlrun serve buffer` did not listen; it said: {line:?}")))
            }
        }
    }

    /// Resident memory now and at most, MiB; `None` on a system that does not say.
    #[must_use]
    pub fn memory_mib(&self) -> Option<(f64, f64)> {
        memory::of_process(self.child.id())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // A process that has already ended cannot be killed; that is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
