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
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8704")]
    pub listen: SocketAddr,
    /// File with the token that the page needs
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    use crate::args::Cli;

    #[test]
    fn the_default_address_is_that_of_no_server() {
        let address = |command: &Command| -> Vec<String> {
            let listen = command.get_arguments().find(|argument| argument.get_id() == "listen");
            let values = listen.expect("it listens").get_default_values();
            values.iter().map(|value| value.to_string_lossy().into_owned()).collect()
        };
        let cli = Cli::command();
        let view = address(cli.find_subcommand("view").expect("there is `rlrun view`"));
        for server in cli.find_subcommand("serve").expect("there is `rlrun serve`").get_subcommands() {
            assert_ne!(address(server), view, "`rlrun serve {}`", server.get_name());
        }
    }
}
