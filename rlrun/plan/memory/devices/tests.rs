//! What the memory of devices is made of, and what is refused.

use device::inventory::Gpu;
use model::{Layout, Sizes};

use super::super::Memory;

use super::*;
use crate::plan::tests::{SIZES, recipe};
use crate::recipe::schema::Lora;
use crate::recipe::words::{
    CollectiveWord, DeviceWord, ModelDtype, PlaceWord, PolicyPlacement, WeightTransport,
};

const GPU: DeviceWord = DeviceWord::At(DeviceLocation::Cuda(0));
const NEXT: DeviceWord = DeviceWord::At(DeviceLocation::Cuda(1));

fn config() -> Config {
    Config::fresh(&SIZES)
}

fn on(device: DeviceWord) -> Recipe {
    let mut recipe = recipe();
    recipe.placement.device = device;
    recipe
}

fn bytes(device: &DeviceMemory, name: &str) -> Option<u64> {
    Some(device.parts.iter().find(|part| part.name == name)?.bytes)
}

fn with_free(free: u64) -> Inventory {
    let (name, capability, total) = ("a GPU".to_owned(), (9, 0), 1 << 40);
    let gpus = vec![Gpu { ordinal: 0, name, capability, free, total }];
    Inventory { driver: Some(13_000), visible: 1, gpus, ..Inventory::default() }
}

#[test]
fn parts_of_a_known_shape_count_what_they_say() {
    let (config, recipe) = (config(), on(GPU));
    let weights = Layout::new(&config).len() as u64;
    let [device] = &DeviceMemory::of(&recipe, &config)[..] else { panic!("there is one device") };
    assert_eq!((device.place, &device.roles[..]), (DeviceLocation::Cuda(0), "the trainer, the sampler"));
    let (attention, gate_up) = (2 * 8 + 24 + 8, 2 * 16);
    let expected = [
        ("policy", 2 * weights),
        ("master", 4 * weights),
        ("gradients", 4 * weights),
        ("optimizer", 8 * weights),
        ("activations", 100 * 2 * (2 * (attention + gate_up) + attention + 8 + 2 * gate_up)),
        ("logits", 100 * 10 * (4 + 2)),
        ("served", 2 * weights),
        ("next", 2 * weights),
        ("kv cache", 640 * 2 * 2 * 2 * 8),
        ("decoding", (10 + 160) * (2 * (attention + gate_up) + 2 * 16 + 4 * 4) + 4 * 256 + 10 * 10 * 2 * 4),
        ("cuda", (512 + 2 * 32) << 20),
    ];
    let found: Vec<_> = device.parts.iter().map(|part| (part.name, part.bytes)).collect();
    assert_eq!(found, expected);
    assert_eq!(device.total(), expected.iter().map(|(_, bytes)| bytes).sum::<u64>());
    assert!(device.to_string().starts_with("cuda:0: the trainer, the sampler, in bf16\n"), "{device}");
    assert_eq!(device.to_string().lines().count(), expected.len() + 2);
}

#[test]
fn recomputed_and_host_tensors_take_no_device_memory() {
    let (config, mut recipe) = (config(), on(GPU));
    let weights = Layout::new(&config).len() as u64;
    let of = |recipe: &Recipe, name: &str| bytes(&DeviceMemory::of(recipe, &config)[0], name);
    recipe.trainer.recompute = Recompute::Block;
    let (attention, gate_up) = (2 * 8 + 24 + 8, 2 * 16);
    let (kept, back) = (2 * 8 + attention + gate_up, attention + 8 + 2 * gate_up);
    assert_eq!(of(&recipe, "activations"), Some(100 * 2 * (kept + back)));
    recipe.placement.optimizer = PlaceWord::Host;
    assert_eq!((of(&recipe, "master"), of(&recipe, "optimizer")), (None, None));
    recipe.placement.optimizer = PlaceWord::Device;
    recipe.dtype = ModelDtype::F32;
    assert_eq!((of(&recipe, "policy"), of(&recipe, "master")), (Some(4 * weights), None));
    recipe.weights.transport = WeightTransport::CudaIpc;
    assert_eq!(of(&recipe, "slots"), Some(8 * weights));
    (recipe.lora, recipe.placement.optimizer) = (Some(Lora::default()), PlaceWord::Host);
    let (factors, _) = recipe.lora().unwrap().shapes(Layout::new(&config).specs());
    let factors = 4 * factors.iter().map(model::ParameterSpec::len).sum::<usize>() as u64;
    assert_eq!((of(&recipe, "gradients"), of(&recipe, "adapter")), (Some(factors), Some(factors)));
    assert_eq!(of(&recipe, "optimizer"), None);
}

#[test]
fn ranks_are_one_device_further_each_and_share_as_their_stage_says() {
    let (config, mut recipe) = (config(), on(GPU));
    let weights = Layout::new(&config).len() as u64;
    recipe.trainer.world = 2;
    recipe.placement.rollout_device = Some(DeviceWord::At(DeviceLocation::Cuda(2)));
    let devices = DeviceMemory::of(&recipe, &config);
    let places: Vec<_> = devices.iter().map(|device| (device.place, &device.roles[..])).collect();
    let expected = [
        (DeviceLocation::Cuda(0), "the trainer"),
        (DeviceLocation::Cuda(1), "the trainer"),
        (DeviceLocation::Cuda(2), "the sampler"),
    ];
    assert_eq!(places, expected);
    assert_eq!(bytes(&devices[1], "policy"), Some(2 * weights));
    assert_eq!(bytes(&devices[1], "optimizer"), Some((8 * weights).div_ceil(2)));
    let master = Some(((4 + 2) * weights).div_ceil(2));
    assert_eq!(bytes(&devices[1], "master"), master, "its part, and that rounded for the others");
    assert_eq!(bytes(&devices[1], "gradients"), Some((4 * weights + 2 * 4 * weights).div_ceil(2)));
    assert_eq!(bytes(&devices[2], "policy"), None);
    assert_eq!(bytes(&devices[2], "cuda"), Some((512 + 32) << 20));
    recipe.trainer.collective = CollectiveWord::Host;
    let by_host = &DeviceMemory::of(&recipe, &config)[1];
    assert_eq!((bytes(by_host, "master"), bytes(by_host, "optimizer")), (None, None));
    recipe.placement.trainer_devices = Some(vec![NEXT, NEXT]);
    recipe.placement.rollout_device = Some(DeviceWord::Cpu);
    let both = DeviceMemory::of(&recipe, &config);
    assert_eq!((both.len(), &both[0].roles[..]), (1, "2 ranks of the trainer"));
    assert_eq!(bytes(&both[0], "policy"), Some(4 * weights));
}

#[test]
fn every_rank_has_the_reference_or_a_layer_of_it() {
    let (config, mut recipe) = (config(), on(GPU));
    let layout = Layout::new(&config);
    let weights = layout.len() as u64;
    recipe.algorithm.kl_coef = 0.1;
    (recipe.trainer.world, recipe.trainer.zero) = (2, 3);
    let of = |recipe: &Recipe, name: &str| -> Vec<Option<u64>> {
        DeviceMemory::of(recipe, &config).iter().map(|device| bytes(device, name)).collect()
    };
    assert_eq!(of(&recipe, "reference"), [Some(2 * weights); 2]);
    let host = |recipe: &Recipe| {
        let parts = Memory::of(recipe, &config, 0).parts;
        parts.iter().find(|part| part.name == "reference").map(|part| part.bytes)
    };
    assert_eq!(host(&recipe), Some(4 * weights), "ranks that are threads share what is copied from");
    recipe.placement.reference_weights = PlaceWord::Host;
    assert_eq!(of(&recipe, "reference"), [None; 2]);
    let without_a_layer = layout.layers()[0].len() as u64 * (layout.layers().len() as u64 - 1);
    assert_eq!(of(&recipe, "offloaded"), [Some(2 * (weights - without_a_layer)); 2]);
    for ranks in [Ranks::Processes, Ranks::Mpi] {
        recipe.trainer.ranks = ranks;
        assert_eq!(host(&recipe), Some(2 * 4 * weights));
    }
    // A teacher has a shape of its own.
    let teacher = tempfile::tempdir().unwrap();
    let shape = Config::fresh(&Sizes { num_layers: 1, ..SIZES });
    std::fs::write(teacher.path().join("config.json"), shape.to_json().to_string()).unwrap();
    recipe.algorithm.reference = Some(teacher.path().to_owned());
    recipe.placement.reference_weights = PlaceWord::Device;
    let of_teacher = Layout::new(&shape).len() as u64;
    assert!(of_teacher < weights);
    assert_eq!(of(&recipe, "reference"), [Some(2 * of_teacher); 2]);
    assert_eq!(host(&recipe), Some(2 * 4 * of_teacher));
}

#[test]
fn samplers_have_the_devices_that_are_listed() {
    let (config, mut recipe) = (config(), on(GPU));
    (recipe.placement.processes, recipe.placement.rollout_workers) = (true, Some(3));
    let roles = |recipe: &Recipe| -> Vec<String> {
        let devices = DeviceMemory::of(recipe, &config);
        devices.iter().map(|device| format!("{}: {}", device.place, device.roles)).collect()
    };
    assert_eq!(roles(&recipe), ["cuda:0: the trainer, 3 samplers"]);
    recipe.placement.rollout_devices = Some(vec![NEXT, GPU, NEXT]);
    assert_eq!(roles(&recipe), ["cuda:0: the trainer, the sampler", "cuda:1: 2 samplers"]);
    let both = DeviceMemory::of(&recipe, &config);
    assert_eq!(bytes(&both[1], "served"), bytes(&both[0], "served").map(|bytes| 2 * bytes));
}

#[test]
fn a_broadcast_needs_nccl() {
    let (config, mut recipe) = (config(), on(GPU));
    recipe.placement.rollout_device = Some(NEXT);
    recipe.weights.transport = WeightTransport::Nccl;
    let mut found = with_free(1 << 30);
    found.gpus.push(Gpu { ordinal: 1, ..found.gpus[0].clone() });
    let error = refuse(&recipe, &config, &found).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(
        error.to_string().contains("needs NCCL 2.14 or later, which was not found: install NCCL"),
        "{error}"
    );
    assert!(describe(&recipe, &config, &found).unwrap().contains("needs NCCL"));
    found.nccl = Some(21_304);
    refuse(&recipe, &config, &found).unwrap_err();
    found.nccl = Some(22_809);
    refuse(&recipe, &config, &found).unwrap();
    assert!(describe(&recipe, &config, &found).unwrap().ends_with("by NCCL: it is there"));
    recipe.weights.transport = WeightTransport::Auto;
    found.nccl = None;
    refuse(&recipe, &config, &found).unwrap();
}

#[test]
fn roles_that_take_turns_need_the_larger_turn() {
    let (config, mut recipe) = (config(), on(GPU));
    recipe.algorithm.kl_coef = 0.1;
    let together = DeviceMemory::of(&recipe, &config)[0].total();
    recipe.placement.policy = Some(PolicyPlacement::Colocated);
    let device = &DeviceMemory::of(&recipe, &config)[0];
    let of = |names: &[&str]| names.iter().filter_map(|name| bytes(device, name)).sum::<u64>();
    let training = of(&["gradients", "activations", "logits", "reference"]);
    let sampling = of(&["served", "next", "kv cache", "decoding"]);
    assert_eq!(device.total(), together - training.min(sampling));
}

#[test]
fn a_run_that_does_not_fit_is_refused_with_its_largest_parts_and_what_helps() {
    let (config, recipe) = (config(), on(GPU));
    refuse(&recipe, &config, &with_free(1 << 30)).unwrap();
    let error = refuse(&recipe, &config, &with_free(1 << 20)).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    let begins = "cuda:0 (the trainer, the sampler) does not fit: needs 576.2 MiB of 1.0 MiB free; the largest: \
                  cuda 576.0 MiB, activations 0.1 MiB, kv cache 0.0 MiB; ";
    assert!(text.starts_with(begins), "{text}");
    assert!(
        text.contains("`trainer.microbatch_tokens`") && text.contains("`rollout.kv_cache_tokens`"),
        "{text}"
    );
    let described = describe(&recipe, &config, &with_free(1 << 20)).unwrap();
    assert!(described.contains("does not fit: needs 576.2 MiB of 1.0 MiB free"), "{described}");
    let described = describe(&recipe, &config, &with_free(1 << 30)).unwrap();
    assert!(described.ends_with("; fits: 1.0 GiB are free"), "{described}");
    let described = describe(&recipe, &config, &Inventory::default()).unwrap();
    assert!(described.ends_with("; it is not there, so nothing is compared"), "{described}");
    assert_eq!(describe(&on(DeviceWord::Cpu), &config, &with_free(0)), None);
}

#[test]
fn a_device_that_is_not_there_is_refused_with_the_reason() {
    let config = config();
    let error = refuse(&on(NEXT), &config, &with_free(1 << 30)).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("cuda:1 cannot be used: this machine shows 1 GPUs"), "{error}");
    let full = (1, "CUDA_ERROR_OUT_OF_MEMORY: out of memory".to_owned());
    let full = Inventory { visible: 2, unusable: vec![full], ..with_free(1 << 30) };
    let error = refuse(&on(NEXT), &config, &full).unwrap_err().to_string();
    assert!(error.contains("cuda:1 cannot be used: CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    refuse(&on(GPU), &config, &full).unwrap();
    let without = Inventory { missing: vec!["no driver: install it".to_owned()], ..Inventory::default() };
    let error = refuse(&on(GPU), &config, &without).unwrap_err();
    assert_eq!(error.to_string(), "device cuda:0 cannot be used: no driver: install it");
    refuse(&on(DeviceWord::At(DeviceLocation::Emulated)), &config, &without).unwrap();
    refuse(&on(DeviceWord::Cpu), &config, &without).unwrap();
    // Ranks that join bring devices of their own.
    let mut joined = on(GPU);
    (joined.trainer.world, joined.trainer.ranks) = (2, Ranks::Processes);
    refuse(&joined, &config, &with_free(1 << 30)).unwrap();
}

#[test]
fn the_host_keeps_what_no_device_has() {
    let (config, mut recipe) = (config(), on(GPU));
    let names = |recipe: &Recipe| -> Vec<&str> {
        Memory::of(recipe, &config, 0).parts.iter().map(|part| part.name).collect()
    };
    let on_device =
        ["policy", "gradients", "optimizer", "activations", "served", "next", "kv cache", "decoding"];
    assert!(names(&recipe).iter().all(|name| !on_device.contains(name)), "{:?}", names(&recipe));
    recipe.placement.optimizer = PlaceWord::Host;
    let kept = names(&recipe);
    assert!(["policy", "gradients", "optimizer"].iter().all(|name| kept.contains(name)), "{kept:?}");
    recipe.placement.rollout_device = Some(DeviceWord::Cpu);
    assert!(names(&recipe).contains(&"kv cache") && names(&recipe).contains(&"published"));
}

#[test]
fn sizes_beyond_all_bounds_saturate() {
    let mut recipe = on(GPU);
    recipe.rollout.max_running = usize::MAX;
    assert_eq!(DeviceMemory::of(&recipe, &config())[0].total(), u64::MAX);
}
