#[global_allocator]
static A: mimalloc::MiMalloc = mimalloc::MiMalloc;
use model::*;
use std::sync::Arc;
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let what = &args[1];
    let preset = &args[2];
    let threads: usize = args[3].parse().unwrap();
    let (h, l, n, kv, i) = match preset.as_str() {
        "tiny" => (128, 4, 4, 2, 512),
        "small" => (256, 6, 8, 4, 1024),
        _ => (896, 24, 14, 2, 4864),
    };
    let config = Config::fresh(&Sizes {
        vocab_size: 100,
        hidden_size: h,
        intermediate_size: i,
        num_layers: l,
        num_heads: n,
        num_kv_heads: kv,
        max_position_embeddings: 512,
    });
    let p = Arc::new(Parameters::random(&config, 1));
    let np = p.layout().len() as f64;
    let cores = Cores::new(2);
    let team = Team::new(&cores, threads);
    if what == "gen" {
        let q = if args.get(4).map(String::as_str) == Some("int8") {
            Quantization::Int8
        } else {
            Quantization::None
        };
        let d = Decoder::sampler(&config, &p, q);
        let (b, prompt, new) = (args.get(5).map_or(64, |s| s.parse().unwrap()), 16usize, 64usize);
        let reps = if preset == "mid" { 1 } else { 5 };
        for _ in 0..reps {
            let mut cache = KvCache::new(&config, b * 96);
            let t = Instant::now();
            let pages: Vec<Vec<u32>> =
                (0..b).map(|_| (0..5).map(|_| cache.take().unwrap()).collect()).collect();
            let toks: Vec<u32> = (0..prompt as u32).map(|x| 4 + x * 7 % 90).collect();
            let seqs: Vec<_> = pages
                .iter()
                .map(|p| StepSequence { tokens: &toks, position: 0, pages: p, wanted: 1 })
                .collect();
            let mut logits = d.step(&mut cache, &seqs, &team).unwrap();
            let mut tsample = 0.0;
            for s in 0..new {
                let u = Instant::now();
                let tk: Vec<u32> =
                    logits.chunks_mut(100).map(|l| Draw::new(l, Sampling::PLAIN, 0.37).token).collect();
                tsample += u.elapsed().as_secs_f64();
                if s + 1 == new {
                    break;
                }
                let seqs: Vec<_> = pages
                    .iter()
                    .zip(tk.chunks(1))
                    .map(|(p, t)| StepSequence { tokens: t, position: prompt + s, pages: p, wanted: 1 })
                    .collect();
                logits = d.step(&mut cache, &seqs, &team).unwrap();
            }
            let s = t.elapsed().as_secs_f64();
            println!(
                "gen {preset} {threads}t: {:.0} tok/s  {:.1} GFLOP/s sample share {:.3}",
                (b * new) as f64 / s,
                2.0 * np * (b * (new + prompt)) as f64 / s / 1e9,
                tsample / s
            );
        }
    } else {
        let rec = match args.get(4).map(String::as_str) {
            Some("block") => Recompute::Block,
            Some("sequence") => Recompute::Sequence,
            _ => Recompute::None,
        };
        let (seqs, len, micro) = if preset == "mid" {
            (8usize, 128usize, 8usize)
        } else {
            (256, 64, args.get(5).map_or(32, |s| s.parse().unwrap()))
        };
        let mut g = Gradients::zeros(p.layout());
        for _ in 0..(if preset == "mid" { 2 } else { 4 }) {
            let t = Instant::now();
            let d = Decoder::trainable(&config, &p, rec);
            let (mut tf, mut tb) = (0.0, 0.0);
            for m in 0..seqs / micro {
                let mut pack = Pack::new();
                let mut rows = vec![];
                let mut targets = vec![];
                for s in 0..micro {
                    let toks: Vec<u32> =
                        (0..len as u32 + 1).map(|x| 4 + (x * (7 + m as u32) + s as u32) % 90).collect();
                    let st = pack.push(&toks[..len]).unwrap();
                    for i in 0..len {
                        rows.push(st + i);
                        targets.push(Target { token: toks[i + 1], temperature: 1.0, kept: None });
                    }
                }
                let u = Instant::now();
                let (_, tr) = d.forward(&pack, &rows, &targets, &team).unwrap();
                tf += u.elapsed().as_secs_f64();
                let sl = vec![PredictionGradient { logprob: -1e-3, entropy: 0.0 }; rows.len()];
                let u = Instant::now();
                d.backward(&pack, tr, &targets, &sl, &mut g, &team).unwrap();
                tb += u.elapsed().as_secs_f64();
            }
            let s = t.elapsed().as_secs_f64();
            println!(
                "train {preset} {threads}t: {:.0} tok/s  {:.1} GFLOP/s fwd {:.1} bwd {:.1}",
                (seqs * len) as f64 / s,
                6.0 * np * (seqs * len) as f64 / s / 1e9,
                2.0 * np * (seqs * len) as f64 / tf / 1e9,
                4.0 * np * (seqs * len) as f64 / tb / 1e9
            );
        }
    }
    println!(
        "{}",
        std::fs::read_to_string("/proc/self/status")
            .unwrap()
            .lines()
            .find(|l| l.starts_with("VmHWM"))
            .unwrap()
    );
}
