//! The command line of `rlrun view`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

/// `rlrun view`.
#[derive(Debug, Args)]
pub struct ViewArgs {
    /// Run directories, running, finished or copied; several are drawn over each other
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Address and port; port 0 chooses a free port. An address that is not loopback needs a token file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8703")]
    pub listen: SocketAddr,
    /// File with the token that the page needs
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}
