//! Times of what ranks send, against closed forms.

use super::*;
use crate::program::Program;
use crate::simulate::calibration::Calibration;
use crate::simulate::inputs::ScenarioInputs;
use crate::simulate::shape;

const TEXT: &str = "[model]\nreduction = \"tree\"\n[model.random]\nhidden_size = 2048\nintermediate_size = 8192\nnum_layers = 16\n\
                    num_heads = 16\nnum_kv_heads = 8\n[data]\nmax_prompt_length = 64\n[data.arithmetic]\n[rollout]\n\
                    max_completion_length = 480\nignore_stop = true\n[[rewards]]\nkind = \"exact\"\n[trainer]\nsteps = 10\n";
/// Tokens of a step: 32 groups of 8 sequences of 480 tokens with prompts of 32.
const STEP_TOKENS: f64 = 32.0 * 8.0 * 512.0;

fn loaded(sets: &[&str]) -> (Recipe, Config) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("r.toml");
    std::fs::write(&path, TEXT).unwrap();
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let recipe = Recipe::load(&path, &sets, &Program::default()).unwrap().0;
    let config = shape(&recipe).unwrap();
    (recipe, config)
}

fn scenario(hardware: &Hardware, sets: &[&str]) -> simulator::Scenario {
    let (recipe, config) = loaded(sets);
    let (hardware, layout) = (hardware.clone(), Layout::new(&config));
    let inputs = ScenarioInputs::new(hardware, Calibration::default(), layout);
    inputs.scenario(&recipe, &config, 10).unwrap().0
}

fn exchanged(hardware: &Hardware, recipe: &Recipe, config: &Config) -> RankExchange {
    RankExchange::of(hardware, recipe, (config, &Layout::new(config)), STEP_TOKENS)
}

fn training_s(hardware: &Hardware, sets: &[&str]) -> f64 {
    scenario(hardware, sets).trainer.seconds(&[512.0; 256])
}

fn near(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-12
}

#[test]
fn ranks_that_divide_the_data_alone_have_the_times_of_their_work_and_of_one_exchange_of_gradients() {
    let h100 = Hardware::open("h100").unwrap();
    let (recipe, config) = loaded(&[]);
    assert_eq!(exchanged(&h100, &recipe, &config), RankExchange::NONE);
    let parameters = Layout::new(&config).len() as f64;
    let products = (config.layer_multiply_adds() + config.vocab_size * config.hidden_size) as f64;
    let flops = h100.flops_per_s.value * h100.training_share.value;
    let updated = 28.0 * parameters / (h100.bandwidth_bytes_per_s.value * h100.decoding_share.value);
    for world in [1.0, 4.0] {
        let set = format!("trainer.world={world}");
        let trainer = scenario(&h100, &[&set]).trainer;
        let gradients = 2.0 * 4.0 * parameters * (world - 1.0) / world / h100.link_bytes_per_s.value;
        assert_eq!(trainer.ranks as f64, world);
        assert!(near(trainer.per_token_s, 3.0 * 2.0 * products / flops), "{trainer:?}");
        assert!(near(trainer.optimizer_s, updated / world + gradients), "{trainer:?} {updated} {gradients}");
        let micro_batches = STEP_TOKENS / world / 4096.0;
        assert!(near(trainer.fixed_s, micro_batches * 3.0 * h100.launch_s.value), "{trainer:?}");
    }
    // Beyond one machine gradients go over the network.
    let (recipe, config) = loaded(&["trainer.world=16"]);
    let far = exchanged(&h100, &recipe, &config).weights_s;
    assert!(near(far, 2.0 * 4.0 * parameters * 15.0 / 16.0 / h100.network_bytes_per_s.value), "{far}");
}

#[test]
fn sharing_weights_pays_over_a_fast_link_and_loses_over_a_slow_one() {
    let mut h100 = Hardware::open("h100").unwrap();
    let tensor: &[&str] = &["trainer.world=2", "trainer.parallel.tensor=2"];
    let alone = training_s(&h100, &[]);
    assert!(training_s(&h100, tensor) < alone);
    let (recipe, config) = loaded(tensor);
    let fast = exchanged(&h100, &recipe, &config);
    let traffic = Traffic::over(&recipe, &config, &Layout::new(&config), STEP_TOKENS).unwrap();
    assert!(near(fast.token_s, traffic.tensor / STEP_TOKENS / h100.link_bytes_per_s.value));
    // In each of 32 micro-batches two sums of a layer, forward and backward, two gathers of residual streams, and four sums of the ends.
    assert!(
        near(fast.calls_s, 32.0 * ((2.0 * 2.0 + 2.0) * 16.0 + 4.0) * h100.link_latency_s.value),
        "{fast:?}"
    );
    h100.link_bytes_per_s.value = 1e9;
    assert!(training_s(&h100, tensor) > alone);
}

#[test]
fn stages_are_idle_for_less_time_with_more_micro_batches() {
    let h100 = Hardware::open("h100").unwrap();
    let mut before = f64::INFINITY;
    for (tokens, passes) in [(32768, 4.0), (8192, 16.0), (2048, 64.0)] {
        let set = format!("trainer.microbatch_tokens={tokens}");
        let (recipe, config) = loaded(&["trainer.world=4", "trainer.parallel.pipeline=4", &set]);
        let exchange = exchanged(&h100, &recipe, &config);
        let slowest = slowest_stage(&config, 4);
        assert!(near(slowest / exchange.stretch, 1.0 - 3.0 / (passes + 3.0)), "{exchange:?}");
        assert!((1.0..1.3).contains(&slowest), "{slowest}");
        assert!(exchange.stretch < before);
        before = exchange.stretch;
    }
}

#[test]
fn rows_of_tokens_go_to_experts_and_only_other_weights_are_gathered() {
    let experts = [
        "model.random.architecture=olmoe",
        "model.random.num_kv_heads=16",
        "trainer.world=4",
        "trainer.zero=3",
    ];
    let (recipe, config) = loaded(&experts);
    let without = Traffic::over(&recipe, &config, &Layout::new(&config), STEP_TOKENS).unwrap();
    assert_eq!((without.expert, without.calls), (0.0, crate::plan::traffic::PassCallCounts::default()));
    let mut sets = experts.to_vec();
    sets.push("trainer.parallel.expert=4");
    let (recipe, config) = loaded(&sets);
    let with = Traffic::over(&recipe, &config, &Layout::new(&config), STEP_TOKENS).unwrap();
    // A row to each of two experts and back, forward and backward, in 16 layers; three of four are those of others.
    assert!(near(with.expert, STEP_TOKENS / 4.0 * 16.0 * 4.0 * 2.0 * 2048.0 * 4.0 * 0.75), "{with:?}");
    assert!(with.zero < 0.5 * without.zero, "{with:?} {without:?}");
    assert!(with.to_string().contains("  expert "), "{with}");
}

/// Ranks that divide experts are neighbours, with the tensor ranks of each: rows leave a machine only if it has fewer devices.
#[test]
fn rows_for_experts_leave_a_machine_if_their_ranks_do() {
    let mut fast = Hardware::open("h100").unwrap();
    fast.devices_per_machine.value = 4.0;
    let mut slow = fast.clone();
    slow.network_bytes_per_s.value /= 10.0;
    for (tensor, context, expert, leaves) in [
        (1, 1, 2, false),
        (1, 1, 4, false),
        (2, 1, 2, false),
        (2, 1, 4, true),
        (1, 2, 4, false),
        (2, 2, 2, false),
        (2, 2, 4, true),
    ] {
        let sets = [
            "model.random.architecture=qwen3_moe".to_owned(),
            "trainer.zero=3".to_owned(),
            "trainer.world=8".to_owned(),
            format!("trainer.parallel.tensor={tensor}"),
            format!("trainer.parallel.context={context}"),
            format!("trainer.parallel.expert={expert}"),
        ];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let (recipe, config) = loaded(&sets);
        let [fast, slow] = [&fast, &slow].map(|hardware| exchanged(hardware, &recipe, &config).token_s);
        assert!(fast > 0.0, "{sets:?}");
        assert_eq!(slow > fast, leaves, "{sets:?}: {slow} {fast}");
    }
}

#[test]
fn ranks_of_a_sampler_have_a_latency_for_every_layer() {
    let cpu = Hardware::open("cpu").unwrap();
    let [alone, shared] = [&[][..], &["rollout.tensor=4"]].map(|sets| scenario(&cpu, sets).samplers);
    let slower = shared.decode.step_s(0.0, 0.0) - alone.decode.step_s(0.0, 0.0);
    assert!((slower - 34.0 * cpu.link_latency_s.value).abs() < 1e-9, "{slower}");
    assert!(shared.prefill.per_token_s > alone.prefill.per_token_s);
    // Devices have a part of the weights each.
    let h100 = Hardware::open("h100").unwrap();
    let [alone, shared] =
        [&[][..], &["rollout.tensor=4"]].map(|sets| scenario(&h100, sets).samplers.decode.step_s(512.0, 2e6));
    assert!(shared < 0.5 * alone, "{shared} {alone}");
}

#[test]
fn transports_take_the_links_that_they_use() {
    let h100 = Hardware::open("h100").unwrap();
    let transfer = VersionTransfer { computed: 2e9, sent: 4e9, copy_s: 1e-3 };
    let of = |transport: WeightTransport, samplers: usize| {
        let (mut recipe, _) = loaded(&[]);
        (recipe.placement.processes, recipe.placement.rollout_workers) = (true, Some(samplers));
        recipe.weights.transport = transport;
        transfer.seconds(&recipe, &h100)
    };
    let (host, link, network) =
        (h100.host_bytes_per_s.value, h100.link_bytes_per_s.value, h100.network_bytes_per_s.value);
    assert_eq!(of(WeightTransport::Auto, 7), [4e9 / host; 2]);
    assert_eq!(of(WeightTransport::Http, 7), [4e9 / host, 7.0 * 4e9 / network + 4e9 / host]);
    assert_eq!(of(WeightTransport::CudaIpc, 7), [1e-3, 7.0 * 2e9 / link]);
    assert_eq!(of(WeightTransport::Nccl, 7), [1e-3, 2e9 / link + h100.link_latency_s.value]);
    // Of samplers on other machines.
    assert_eq!(of(WeightTransport::Auto, 8), of(WeightTransport::Http, 8));
    assert_eq!(of(WeightTransport::Nccl, 8), [1e-3, 2e9 / network + h100.network_latency_s.value]);
}

/// Of a layer a rank moves what is not of the experts of others, and rows too if ranks do not exchange from device to device.
#[test]
fn ranks_that_divide_experts_on_devices_move_their_own_through_the_host() {
    let h100 = Hardware::open("h100").unwrap();
    let sets = ["trainer.world=2", "trainer.zero=3", "trainer.parallel.expert=2"];
    let (recipe, tree) = loaded(&[&sets[..], &["model.random.architecture=qwen3_moe"]].concat());
    let config = Config { reduction: Reduction::Chain, ..tree };
    let layout = Layout::new(&config);
    let experts = expert_values(&layout, 2);
    assert!(experts > layout.len() / 2 && expert_values(&layout, 1) == 0);
    let traffic = Traffic::over(&recipe, &config, &layout, 1e4).unwrap();
    let [moved, rows] = by_host_s(&h100, &recipe, (&config, &layout), &traffic);
    let own = 4.0 * (layout.len() - experts / 2) as f64;
    assert!(near(moved, 3.0 * traffic.passes[0] * own / h100.host_bytes_per_s.value), "{moved}");
    let through_host = recipe.collective() == CollectivePlace::Host;
    let expected = if through_host { 2.0 * traffic.expert / h100.host_bytes_per_s.value } else { 0.0 };
    assert_eq!(rows, expected);
}

#[test]
fn ranks_of_a_pass_on_devices_update_weights_through_the_host() {
    let h100 = Hardware::open("h100").unwrap();
    for degree in ["tensor", "context", "pipeline"] {
        let (recipe, tree) = loaded(&["trainer.world=2", &format!("trainer.parallel.{degree}=2")]);
        let chain = Config { reduction: Reduction::Chain, ..tree.clone() };
        let host = h100.host_bytes_per_s.value;
        // Context ranks have all weights.
        let shards = if degree == "context" { 1.0 } else { 2.0 };
        let moved = 2.0 * 4.0 * Layout::new(&chain).len() as f64 / shards / host;
        let [there, on_host] = [&chain, &tree].map(|config| exchanged(&h100, &recipe, config));
        assert!(near(there.weights_s - on_host.weights_s, moved), "{degree}");
        // A hidden state of a token there and back, for which the stages before and behind wait too.
        let stages = degree == "pipeline";
        let streams = if stages { 2.0 * 2.0 * 4.0 * chain.hidden_size as f64 / host } else { 0.0 };
        assert!(!stages || there.token_s >= on_host.token_s + streams, "{there:?} {on_host:?}");
        let (layout, tokens) = (Layout::new(&chain), 1e4);
        let traffic = Traffic::over(&recipe, &chain, &layout, tokens).unwrap();
        let cpu = Hardware::open("cpu").unwrap();
        assert_eq!(by_host_s(&cpu, &recipe, (&chain, &layout), &traffic), [0.0; 2]);
        let [_, of_streams] = by_host_s(&h100, &recipe, (&chain, &layout), &traffic);
        assert!(if stages { near(of_streams, tokens * streams) } else { of_streams == 0.0 }, "{degree}");
    }
}
