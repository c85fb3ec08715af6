//! `rlrun view`: the live page of run directories.
//!
//! Invariant: it reads files and takes no lock, so that it changes nothing about a run that is in progress.

use dashboard::DashboardConfig;

use crate::args::ViewArgs;
use crate::failure::Failure;
use crate::program::Program;
use crate::run_page::open_page;
use crate::serve::{ServerSignals, runtime, say, token};
use crate::why;

/// Serves the page until a signal stops it.
pub(super) fn view(args: &ViewArgs, program: &Program) -> Result<String, Failure> {
    let token = args.token_file.as_deref().map(token).transpose()?;
    let advisor = Some(why::advisor(program));
    let config = DashboardConfig { listen: args.listen, token, runs: args.runs.clone(), advisor };
    let needs_token = config.token.is_some();
    let runtime = runtime()?;
    let served = runtime.block_on(async {
        let signals = ServerSignals::listen()?;
        let server = open_page(config).await?;
        say(&format!("listening on http://{}", server.local_addr()));
        if needs_token {
            // The token itself stays out of terminals and logs.
            say("open it with ?token= and the token of the file");
        }
        server.serve(signals.stop()).await;
        Ok(String::new())
    });
    // Recommendations that are being computed do not delay the end.
    runtime.shutdown_background();
    served
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_served_is_refused_with_its_reason() {
        let directory = tempfile::tempdir().unwrap();
        let args = |listen: &str| ViewArgs {
            runs: vec![directory.path().to_owned()],
            listen: listen.parse().unwrap(),
            token_file: None,
        };
        for (listen, reason) in [
            ("127.0.0.1:0", "is no run directory: it has neither `metrics.jsonl` nor `resolved.toml` nor"),
            ("0.0.0.0:0", "give a token with a token file"),
        ] {
            let error = view(&args(listen), &Program::default()).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
