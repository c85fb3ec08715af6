//! `rlrun serve islands`: the coordinator of islands as a process.
//!
//! Invariant: an address that other machines can reach has a token, and TLS unless the operator waives it.

use std::sync::Arc;
use std::time::Duration;

use buffer::http::{ServerError, Tls};
use islands::server::CoordinatorServer;
use islands::{Coordinator, CoordinatorConfig, OuterOptimizer};

use crate::args::ServeIslandsArgs;
use crate::failure::Failure;
use crate::serve::{ServerSignals, runtime, say, token};

/// Longest deadline of a round: a year, seconds.
const LONGEST_S: f64 = 31_536_000.0;

/// Serves a coordinator until a signal stops it.
///
/// # Errors
/// A directory, token file, certificate or address that cannot be used.
pub(crate) fn serve(args: &ServeIslandsArgs) -> Result<String, Failure> {
    let address = args.listen;
    if !address.ip().is_loopback() {
        if args.token_file.is_none() {
            return Err(ServerError::NoTokens { address }.into());
        }
        if args.certificate.tls_cert.is_none() && !args.insecure {
            return Err(ServerError::Unencrypted { address }.into());
        }
    }
    let config = config(args)?;
    let token = args.token_file.as_deref().map(token).transpose()?;
    let tls = args.certificate.read()?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let coordinator = Arc::new(Coordinator::open(config)?);
    runtime()?.block_on(async {
        let signals = ServerSignals::listen()?;
        let tls = tls.as_ref().map(Tls::acceptor);
        let server = CoordinatorServer::bind(coordinator, address, token.as_deref(), tls).await?;
        say(&format!("listening on {scheme}://{}", server.local_addr()));
        server.serve(signals.stop()).await;
        Ok(String::new())
    })
}

fn config(args: &ServeIslandsArgs) -> Result<CoordinatorConfig, Failure> {
    let ServeIslandsArgs { outer_rate: rate, outer_momentum: momentum, deadline, .. } = *args;
    if !(rate > 0.0 && rate.is_finite()) {
        return Err(Failure::Argument(format!("--outer-rate is {rate}; it must be above 0")));
    }
    if !(0.0..1.0).contains(&momentum) {
        return Err(Failure::Argument(format!(
            "--outer-momentum is {momentum}; it must be at least 0 and below 1"
        )));
    }
    if !(deadline > 0.0 && deadline <= LONGEST_S) {
        let reason = format!("--deadline is {deadline} s; it must be above 0 and at most {LONGEST_S}");
        return Err(Failure::Argument(reason));
    }
    Ok(CoordinatorConfig {
        dir: args.dir.clone(),
        optimizer: OuterOptimizer { rate, momentum },
        deadline: Duration::from_secs_f64(deadline),
        first_islands: args.first_islands,
        max_islands: args.max_islands,
        max_bytes: args.max_bytes,
    })
}
