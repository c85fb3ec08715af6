//! The command line of `rlrun serve`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use buffer::OnStale;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args, Subcommand};
use model::Quantization;

use super::at_least_one;
use super::certificate::CertificateArgs;
use super::compute_on::DeviceArgs;
use super::islands::ServeIslandsArgs;
use super::training::ServeTrainingArgs;
use crate::recipe::words::SampleOrder;

/// The services of `rlrun serve`.
#[derive(Debug, Subcommand)]
pub enum ServeCommand {
    /// A buffer of groups over HTTP, for samplers and trainers in other processes
    Buffer(Box<ServeBufferArgs>),
    /// A coordinator of islands: runs over slow links that exchange outer gradients
    Islands(ServeIslandsArgs),
    /// A policy as an endpoint that speaks the protocols of OpenAI, Anthropic and vLLM
    Policy(ServePolicyArgs),
    /// A reward model over HTTP, for `kind = "model"` with a `url`, and for OpenRLHF's clients
    Reward(ServeRewardArgs),
    /// The trainer as a service, for clients of tinker: passes, updates, samplers, saved weights
    Training(ServeTrainingArgs),
}

/// `rlrun serve policy`.
#[derive(Debug, Args)]
pub struct ServePolicyArgs {
    /// Run directory, model directory, GGUF file, or hf:OWNER/NAME
    #[arg(value_name = "MODEL_OR_RUN")]
    pub target: PathBuf,
    /// Address and port; port 0 chooses a free port. An address that is not loopback needs a token file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8702")]
    pub listen: SocketAddr,
    /// File with the key that clients need
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Name of the model in requests [default: the last part of MODEL_OR_RUN]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Serve an adapter under a name of its own, beside the model: a directory that PEFT wrote, the run that trained it, or
    /// hf:OWNER/NAME; can be repeated
    #[arg(long = "adapter", value_name = "NAME=DIR_OR_RUN")]
    pub adapters: Vec<AdapterArg>,
    /// Largest number of cores at a time [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Quantization of the weights: none, int8 or bf16
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = quantization())]
    pub quantization: Quantization,
    /// Most tokens of prompt and completion [default: the context of the model, at most 32768]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub max_context: Option<usize>,
    /// Sequences that are decoded together
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub max_running: usize,
    /// Answers that are open at the same time; one more is refused
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    pub max_open: usize,
    /// Tokens that the KV cache holds [default: those of `--max-running` sequences of the longest kind, within a quarter of
    /// the memory that the machine has free]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub kv_cache_tokens: Option<usize>,
    /// Device of the command.
    #[command(flatten)]
    pub on: DeviceArgs,
}

/// An adapter, and its name in requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterArg {
    /// The name.
    pub name: String,
    /// Directory that PEFT wrote, run directory, or hf:OWNER/NAME.
    pub path: PathBuf,
}

impl FromStr for AdapterArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.into() })
            }
            _ => Err("an adapter is NAME=DIR_OR_RUN, such as sql=outputs/sql".to_owned()),
        }
    }
}

/// `rlrun serve reward`.
#[derive(Debug, Args)]
pub struct ServeRewardArgs {
    /// Model directory or hf:OWNER/NAME: a sequence classifier with one label
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Address and port; port 0 chooses a free port. An address that is not loopback needs a token file
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8701")]
    pub listen: SocketAddr,
    /// File with the token that clients need
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Largest number of tokens in a packed batch [default: 8192]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub batch_tokens: Option<usize>,
    /// Largest number of cores at a time [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Quantize the weights of the layers to 8 bits
    #[arg(long, action = ArgAction::SetTrue)]
    pub int8: bool,
}

/// `rlrun serve buffer`.
#[derive(Debug, Args)]
pub struct ServeBufferArgs {
    /// Directory of the journal; created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Keep the groups in the PostgreSQL database at this URL instead of a journal; of several servers of a schema one is
    /// active and the others are its standbys
    #[arg(long, value_name = "URL")]
    pub postgres: Option<String>,
    /// Schema of the database [default: rlrun_ and the name of DIR]
    #[arg(long, value_name = "NAME", requires = "postgres")]
    pub schema: Option<String>,
    /// Address and port; port 0 chooses a free port. An address that is not loopback needs a token file and TLS
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8700")]
    pub listen: SocketAddr,
    /// Capacity, staleness and order.
    #[command(flatten)]
    pub keep: KeepArgs,
    /// Refuse token ids from this number up
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab_size: Option<u32>,
    /// Tokens that clients need, in lines such as `writer TOKEN`, `trainer TOKEN`, `admin TOKEN`
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate.
    #[command(flatten)]
    pub certificate: CertificateArgs,
    /// Allow tokens to cross the network without TLS
    #[arg(long, conflicts_with = "tls_cert")]
    pub insecure: bool,
    /// Host name that clients may use for a server on loopback, in addition to localhost; can be repeated
    #[arg(long = "allow-host", value_name = "NAME")]
    pub allow_hosts: Vec<String>,
    /// Address and port of a page in the browser that shows the buffer; one that is not loopback needs a token file
    #[arg(long, value_name = "ADDRESS")]
    pub dashboard: Option<SocketAddr>,
    /// File with the token that the page needs
    #[arg(long, value_name = "FILE", requires = "dashboard")]
    pub dashboard_token_file: Option<PathBuf>,
    /// Show nothing but the address and errors
    #[arg(short, long, action = ArgAction::SetTrue)]
    pub quiet: bool,
}

/// Capacity, staleness and order of a served buffer.
#[derive(Clone, Copy, Debug, Args)]
pub struct KeepArgs {
    /// Groups per training step
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub batch_groups: usize,
    /// Largest number of versions between the oldest token of a group and the step that trains on it
    #[arg(long, value_name = "VERSIONS", default_value_t = 4)]
    pub max_staleness: u64,
    /// Treatment of groups that exceed the bound
    #[arg(long, value_name = "WHAT", default_value = "wait", value_parser = on_stale())]
    pub on_stale: OnStale,
    /// Order in which groups are leased; all orders but fifo need `--on-stale drop`
    #[arg(long, value_name = "ORDER", default_value = "fifo", value_parser = order())]
    pub order: SampleOrder,
    /// For `--order reward`: a group's sampling weight is exp(mean reward / temperature)
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    pub reward_temperature: f64,
    /// Number of steps that train on a group before it is deleted; more than one needs `--on-stale drop`
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_uses: u32,
    /// Skip a trajectory if the buffer has one of the same task with the same tokens
    #[arg(long)]
    pub dedup: bool,
    /// Capacity for stored groups in bytes, such as 512MiB
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = size)]
    pub max_bytes: u64,
}

fn on_stale() -> impl TypedValueParser<Value = OnStale> {
    PossibleValuesParser::new(["wait", "drop"]).map(|word| match word.as_str() {
        "drop" => OnStale::Drop,
        _ => OnStale::Wait,
    })
}

fn quantization() -> impl TypedValueParser<Value = Quantization> {
    PossibleValuesParser::new(["none", "int8", "bf16"]).map(|word| match word.as_str() {
        "int8" => Quantization::Int8,
        "bf16" => Quantization::Bf16,
        _ => Quantization::None,
    })
}

fn order() -> impl TypedValueParser<Value = SampleOrder> {
    PossibleValuesParser::new(["fifo", "recency", "reward", "uniform"]).map(|word| match word.as_str() {
        "recency" => SampleOrder::Recency,
        "reward" => SampleOrder::Reward,
        "uniform" => SampleOrder::Uniform,
        _ => SampleOrder::Fifo,
    })
}

/// Bytes: a whole number, without a unit or in KiB, MiB, GiB or TiB.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let wrong = || "write a whole number of bytes, KiB, MiB, GiB or TiB, such as 16GiB".to_owned();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.trim_start() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err("it must be more than nothing".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err("that is more than can be counted".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in
            [("1", 1), ("7B", 7), ("64KiB", 1 << 16), ("3 MiB", 3 << 20), ("16GiB", 16 << 30)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "GiB", "16GB", "16gib", "-1", "1.5GiB", "0", "99999999999TiB", "1GiB2"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
