//! `rlrun view`: the live page of run directories.
//!
//! Invariant: it reads files and takes no lock, so that it changes nothing about a run that is in progress.

use dashboard::{DashboardConfig, DashboardError, DashboardServer};

use crate::args::ViewArgs;
use crate::failure::Failure;
use crate::serve::{ServerSignals, runtime, say, token};

/// Serves the page until a signal stops it.
pub(super) fn view(args: &ViewArgs) -> Result<String, Failure> {
    let token = args.token_file.as_deref().map(token).transpose()?;
    let config = DashboardConfig { listen: args.listen, token, runs: args.runs.clone() };
    let needs_token = config.token.is_some();
    runtime()?.block_on(async {
        let signals = ServerSignals::listen()?;
        let server = DashboardServer::bind(config).await.map_err(|error| match error {
            DashboardError::Listen { address, source } => {
                Failure::System { what: format!("listen on {address}"), source }
            }
            other => Failure::Argument(other.to_string()),
        })?;
        say(&format!("listening on http://{}", server.local_addr()));
        if needs_token {
            // The token itself stays out of terminals and logs.
            say("open it with ?token= and the token of the file");
        }
        server.serve(signals.stop()).await;
        Ok(String::new())
    })
}
