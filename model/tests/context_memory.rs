//! Memory that a context rank needs for a pass over one long sequence, by the number of ranks. Every rank is a process, so that its
//! peak is its own: this program again, with the one test `a_rank`.
//!
//! Invariant: the processes are dead when the test ends.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use collective::Collective;
use collective::tcp::{Listener, join};
use model::{
    Config, ContextExchange, Decoder, Gradients, Pack, Parameters, PassRanks, Prediction, PredictionGradient,
    Recompute, Sizes, Target, ThreadPool, TrainedTargets,
};

/// What tells a process of this program that it is a rank: the address of rank 0, its number, the number of ranks, and the tokens.
const RANK: &str = "RLRUN_TEST_CONTEXT_RANK";
const SECRET: &[u8] = b"of the test";
/// Against hangs only.
const LONG: Duration = Duration::from_secs(1800);

struct RankProcess(Child);

impl Drop for RankProcess {
    fn drop(&mut self) {
        // Dead already, or killed here.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A number of `/proc/self/status`, MiB.
fn status_mib(name: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0
}

/// Peak memory of a training pass over one sequence beyond that of weights and gradients, MiB.
fn peak_mib(ranks: PassRanks, tokens: usize) -> f64 {
    let config = Config::fresh(&Sizes {
        vocab_size: 64,
        hidden_size: 128,
        intermediate_size: 384,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: tokens,
    });
    let parameters = Arc::new(Parameters::random(&config, 7));
    let mut gradients = Gradients::zeros(parameters.layout());
    let decoder = Decoder::trainable(&config, &parameters, Recompute::None).among(ranks);
    let sequence: Vec<u32> = (0..tokens).map(|at| (at * at % 61) as u32).collect();
    let mut pack = Pack::new();
    pack.push(&sequence).unwrap();
    let rows: Vec<usize> = (0..tokens).collect();
    let targets = vec![Target { token: 5, temperature: 1.0, kept: None }; tokens];
    let samples = [tokens];
    let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &samples };
    let mut slopes = |_: Range<usize>, predictions: &[Prediction]| {
        vec![PredictionGradient { logprob: 1e-3, ..PredictionGradient::default() }; predictions.len()]
    };
    // Sets the peak to what is there now.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status_mib("VmRSS:");
    decoder.train(&pack, trained, &mut slopes, &mut gradients, &ThreadPool::single()).unwrap();
    status_mib("VmHWM:") - before
}

#[test]
#[ignore = "is a rank of the measurement"]
fn a_rank() {
    let Some(words) = std::env::var_os(RANK).and_then(|words| words.into_string().ok()) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [addr, rank, world, tokens] = words[..] else { panic!("four words, not {words:?}") };
    let [rank, world, tokens] = [rank, world, tokens].map(|number| number.parse::<usize>().unwrap());
    let context: Option<Arc<dyn Collective>> = match (world, rank) {
        (1, _) => None,
        (_, 0) => {
            let listener = Listener::bind(addr.parse().unwrap(), SECRET).unwrap();
            Some(Arc::new(listener.accept(world, LONG).unwrap()))
        }
        _ => Some(Arc::new(join(addr, SECRET, Some(rank), LONG).unwrap())),
    };
    let ranks =
        PassRanks { context, sections: world, exchange: ContextExchange::Keys, ..PassRanks::default() };
    writeln!(std::io::stdout(), "peak {}", peak_mib(ranks, tokens)).unwrap();
}

/// The largest peak of `world` ranks, MiB.
fn measured(world: usize, tokens: usize) -> f64 {
    // The port of a listener that is closed is free again.
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let start = |rank: usize| {
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "context_memory::a_rank", "--ignored", "--nocapture", "--quiet"])
            .env(RANK, format!("{} {rank} {world} {tokens}", free))
            .stdout(Stdio::piped())
            .spawn();
        RankProcess(process.unwrap())
    };
    let mut ranks: Vec<RankProcess> = (0..world).map(start).collect();
    let peak = |RankProcess(process): &mut RankProcess| {
        let mut said = String::new();
        process.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        let peak = said.lines().find_map(|line| line.split_once("peak ")).unwrap_or_else(|| panic!("{said}"));
        peak.1.parse::<f64>().unwrap()
    };
    ranks.iter_mut().map(peak).fold(0.0, f64::max)
}

/// `cargo test --release -p rlrun-model --test model -- --ignored --exact --nocapture
/// context_memory::a_rank_needs_its_share_of_the_activations`
#[test]
#[ignore = "takes minutes"]
fn a_rank_needs_its_share_of_the_activations() {
    let mut table = String::from("| tokens | 1 rank | 2 ranks | 4 ranks |\n");
    let (mut least, mut most) = ([f64::INFINITY; 3], [0.0_f64; 3]);
    for tokens in [4096, 8192, 16384, 32768] {
        let peaks = [1, 2, 4].map(|world| measured(world, tokens));
        let [one, two, four] = peaks.map(|peak| format!("{peak:.0} MiB"));
        table += &format!("| {tokens} | {one} | {two} | {four} |\n");
        for ((least, most), peak) in least.iter_mut().zip(&mut most).zip(peaks) {
            (*least, *most) = (least.min(peak), most.max(peak));
        }
    }
    write!(std::io::stdout(), "{table}").unwrap();
    let growth: Vec<f64> = most.iter().zip(least).map(|(most, least)| most - least).collect();
    // Sections cost the same. Where pairs of tokens cost most, as in this small model, the first of them has sqrt(1 / ranks) of the
    // tokens. The keys and values of all tokens before them, which the last rank has, do not shrink.
    assert!(growth[1] < 0.75 * growth[0] && growth[2] < 0.85 * growth[1], "{growth:?}");
}
