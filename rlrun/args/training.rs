//! The command line of `rlrun serve training`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::at_least_one;
use super::certificate::CertificateArgs;

/// `rlrun serve training`.
#[derive(Debug, Args)]
pub struct ServeTrainingArgs {
    /// A base model: a directory, a GGUF file, a run or hf:OWNER/NAME, and its name for clients [default name: the last part]; can be
    /// repeated
    #[arg(long = "model", value_name = "[NAME=]DIR", required = true)]
    pub models: Vec<NamedModel>,
    /// Address and port; port 0 chooses a free port. An address that is not loopback needs a token file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8703")]
    pub listen: SocketAddr,
    /// Directory of saved weights, a run directory for every model
    #[arg(long, value_name = "DIR", default_value = "outputs/service")]
    pub dir: PathBuf,
    /// File with the keys of users, lines `NAME KEY`; clients of tinker need keys that begin with tml-
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate.
    #[command(flatten)]
    pub certificate: CertificateArgs,
    /// Largest number of cores at a time [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Sequences that an engine decodes together
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub max_running: usize,
    /// Most tokens of a sequence [default: the context of the model, at most 32768]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub max_context: Option<usize>,
    /// Models that are loaded at the same time; one more is refused
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub max_models: usize,
    /// Requests of a user that are in progress; one more is refused
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub max_open: usize,
    /// A session without a heartbeat for so many seconds has ended, and its models are unloaded
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = at_least_one)]
    pub session_timeout: usize,
}

/// A base model and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedModel {
    /// The name; `None` for the last part of the path.
    pub name: Option<String>,
    /// Directory, GGUF file, or hf:OWNER/NAME.
    pub path: PathBuf,
}

impl FromStr for NamedModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: Some(name.to_owned()), path: path.into() })
            }
            None if !text.is_empty() => Ok(Self { name: None, path: text.into() }),
            _ => Err("a model is DIR or NAME=DIR, such as Qwen/Qwen3-8B=models/qwen3".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_may_have_a_name() {
        let named =
            |name: Option<&str>, path: &str| NamedModel { name: name.map(str::to_owned), path: path.into() };
        assert_eq!("a/b".parse(), Ok(named(None, "a/b")));
        assert_eq!("Qwen/Qwen3-8B=a/b".parse(), Ok(named(Some("Qwen/Qwen3-8B"), "a/b")));
        assert!(
            "=a".parse::<NamedModel>().is_err()
                && "a=".parse::<NamedModel>().is_err()
                && "".parse::<NamedModel>().is_err()
        );
    }
}
