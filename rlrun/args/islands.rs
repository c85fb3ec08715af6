//! The command line of `rlrun serve islands`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args};

use super::at_least_one;
use super::certificate::CertificateArgs;
use super::serve::size;

/// `rlrun serve islands`.
#[derive(Debug, Args)]
pub struct ServeIslandsArgs {
    /// Directory of outer weights and rounds; created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Address and port; port 0 chooses a free port. An address that is not loopback needs a token file and TLS
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8703")]
    pub listen: SocketAddr,
    /// Learning rate of the outer optimizer
    #[arg(long, value_name = "RATE", default_value_t = 0.7)]
    pub outer_rate: f32,
    /// Nesterov momentum of the outer optimizer
    #[arg(long, value_name = "MOMENTUM", default_value_t = 0.9)]
    pub outer_momentum: f32,
    /// Longest time from the first outer gradient of a round to its end; islands that are later are not in it, unless the
    /// coordinator is receiving what they send, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub deadline: f64,
    /// Islands that begin together: the first round waits for them, until its deadline
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub first_islands: usize,
    /// Most live islands
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub max_islands: usize,
    /// Most memory of the outer weights, such as 512MiB; momentum, residual and the copy that islands download need as
    /// much again each
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = size)]
    pub max_bytes: u64,
    /// File with the token that islands need
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate.
    #[command(flatten)]
    pub certificate: CertificateArgs,
    /// Allow tokens to cross the network without TLS
    #[arg(long, conflicts_with = "tls_cert", action = ArgAction::SetTrue)]
    pub insecure: bool,
}
