//! Devices in a recipe: what is said about them, what is refused, and where roles end up.

use device::device::DeviceLocation;
use model::on_device::DeviceDtype;
use trainer::FrozenPlace;

use super::super::words::{CollectiveWord, DeviceWord, ModelDtype, WeightTransport};
use super::{Case, MINIMAL, Recipe};

const EMULATED: &str = "placement.device=emulated";

/// The errors except that this program was built without the device.
fn refused(sets: &[&str], message: &str, help: &str) {
    let shown = Case::new(MINIMAL).errors(sets, &[]);
    assert!(shown.contains(&format!("error: {message}")) && shown.contains(help), "{sets:?}: {shown}");
}

fn recipe(sets: &[&str]) -> Recipe {
    Case::new(MINIMAL).load(sets, &[]).unwrap().0
}

#[test]
fn devices_are_read_as_they_are_written() {
    for (text, device) in [
        ("cpu", DeviceWord::Cpu),
        ("emulated", DeviceWord::At(DeviceLocation::Emulated)),
        ("cuda:0", DeviceWord::At(DeviceLocation::Cuda(0))),
        ("cuda:3", DeviceWord::At(DeviceLocation::Cuda(3))),
    ] {
        assert_eq!(text.parse(), Ok(device));
        assert_eq!(device.to_string(), text);
    }
    assert_eq!("cuda".parse(), Ok(DeviceWord::At(DeviceLocation::Cuda(0))));
    for text in ["gpu", "cuda:", "cuda:-1", "CPU", ""] {
        let expected = format!("`placement.device`: `{text}` is no device; write \"cuda\" for the first GPU");
        refused(&[&format!("placement.device={text:?}")], &expected, "--set:1:");
    }
    refused(&["placement.device=3"], "`placement.device`: expected a string", "--set:1:");
    refused(
        &["placement.trainer_devices=[\"cuda:0\", \"x\"]"],
        "`placement.trainer_devices[1]`: `x` is no device",
        "",
    );
}

#[test]
fn ranks_of_a_sampler_are_on_the_processor() {
    let sets = ["model.reduction=tree", "rollout.tensor=2"];
    refused(
        &[&sets[..], &["placement.rollout_device=emulated"]].concat(),
        "the ranks of a sampler (`rollout.tensor`) compute on the processor",
        "set `rollout.tensor` to 1, or `placement.rollout_device = \"cpu\"`",
    );
    assert_eq!(recipe(&sets).rollout.tensor, 2);
}

#[test]
fn words_of_dtypes_and_transports_are_listed() {
    refused(&["model.dtype=f16"], "`model.dtype` cannot be \"f16\"", "\"auto\", \"f32\", \"bf16\"");
    refused(
        &["placement.optimizer=disk"],
        "`placement.optimizer` cannot be \"disk\"",
        "\"device\", \"host\"",
    );
    refused(
        &["weights.transport=cuda_ipc"],
        "`weights.transport` cannot be \"cuda_ipc\"",
        "did you mean \"cuda-ipc\"?",
    );
    refused(&["model.torch_dtype=bf16"], "unknown key `model.torch_dtype`", "rlrun calls it `model.dtype`");
}

#[test]
fn a_program_refuses_devices_that_it_was_built_without() {
    let loads = |set: &str| Case::new(MINIMAL).load(&[set], &[]).is_ok();
    for set in
        ["placement.device=cuda:1", "placement.rollout_device=cuda", "placement.trainer_devices=[\"cuda:0\"]"]
    {
        assert_eq!(loads(set), cfg!(feature = "cuda"), "{set}");
    }
    assert_eq!(loads(EMULATED), cfg!(feature = "emulator"));
    if !cfg!(feature = "cuda") {
        refused(
            &["placement.trainer_device=cuda:1"],
            "`placement.trainer_device` is \"cuda:1\", and this program was built without CUDA",
            "build it with `--features cuda`",
        );
    }
    if !cfg!(feature = "emulator") {
        refused(
            &[EMULATED],
            "`placement.device` is \"emulated\", and this program was built without the emulator",
            "build it with `--features emulator`",
        );
    }
}

#[test]
fn unsupported_settings_of_devices_are_refused_with_the_reason() {
    for (set, message, help) in [
        (
            "rollout.quantization=int8",
            "`rollout.quantization` has kernels for the processor alone",
            "rollout_device",
        ),
        ("rollout.speculation=ngram", "`rollout.speculation` is for the processor alone", "rollout_device"),
        ("model.reduction=tree", "`model.reduction` is \"tree\", which has kernels for the processor", "cpu"),
        ("rollout.bitwise=true", "`rollout.bitwise` promises that sampler and trainer", "remove it"),
        (
            "trainer.optimizer=muon",
            "`trainer.optimizer` is \"muon\", which moves weights on the host",
            "\"host\"",
        ),
        ("trainer.optimizer=adamw8bit", "`trainer.optimizer` is \"adamw8bit\", which moves", "\"host\""),
        ("lora.rank=4", "`[lora]` is merged on the host", "placement.optimizer = \"host\""),
        ("placement.rollout_device=cuda", "a GPU and the emulator have no memory in common", "one kind"),
    ] {
        refused(&[EMULATED, set], message, help);
    }
    refused(
        &[EMULATED, "placement.policy=colocated", "placement.rollout_device=cpu"],
        "sampler and trainer take turns (`placement.policy`), but not on the same device",
        "place both on one device",
    );
    if cfg!(feature = "emulator") {
        recipe(&[EMULATED, "placement.optimizer=host", "trainer.optimizer=muon", "lora.rank=4"]);
        recipe(&[EMULATED, "placement.policy=colocated", "model.dtype=bf16"]);
        recipe(&[EMULATED, "placement.rollout_device=cpu", "rollout.quantization=int8"]);
    }
}

#[test]
fn sixteen_bits_need_a_device_for_every_role() {
    refused(
        &["model.dtype=bf16"],
        "`model.dtype` is \"bf16\", but the trainer computes on the processor, whose kernels are f32",
        "`model.dtype = \"auto\"`",
    );
    refused(
        &["model.dtype=bf16", EMULATED, "placement.rollout_device=cpu"],
        "`model.dtype` is \"bf16\", but the sampler computes on the processor",
        "weights.dtype",
    );
    recipe(&["model.dtype=f32"]);
    refused(
        &["placement.optimizer=host"],
        "`placement.optimizer` has no effect: the trainer computes on the processor",
        "set `placement.device`",
    );
    let on_host = "placement.reference_weights=host";
    for (sets, why) in [
        (&["algorithm.kl_coef=0.1", on_host][..], "the trainer computes on the processor"),
        (&[EMULATED, on_host], "the run compares with no reference"),
    ] {
        refused(sets, &format!("`placement.reference_weights` has no effect: {why}"), "remove it");
    }
    let offloaded = recipe(&[EMULATED, "algorithm.kl_coef=0.1", "placement.reference_weights=host"]);
    assert_eq!(offloaded.trains_on().unwrap().frozen, FrozenPlace::Host);
}

#[test]
fn a_transport_between_devices_needs_devices_and_a_receiver() {
    let processes = "placement.processes=true";
    let transport = "weights.transport=cuda-ipc";
    refused(&[transport, processes], "`weights.transport` is", "set `placement.device`");
    refused(
        &[transport, processes, EMULATED, "placement.rollout_device=cpu"],
        "`weights.transport` is",
        "weights.transport = \"auto\"",
    );
    refused(&[transport, EMULATED], "`weights.transport` \"", "set `placement.processes = true`");
    refused(
        &[transport, EMULATED, "buffer.listen=127.0.0.1:0"],
        "`weights.transport` \"cuda-ipc\" is for other processes",
        "set `placement.processes = true`",
    );
    refused(
        &["weights.transport=cuda-ipc", processes, EMULATED, "trainer.world=2", "trainer.zero=3"],
        "`weights.transport` \"cuda-ipc\" is of a rank that has all weights, and with `trainer.zero` = 3 none has",
        "lower `trainer.zero`",
    );
    refused(
        &["weights.transport=cuda-ipc", processes, EMULATED, "weights.dtype=bf16"],
        "`weights.dtype` has no effect with `weights.transport` \"cuda-ipc\"",
        "model.dtype",
    );
    if cfg!(feature = "emulator") {
        let ipc = recipe(&["weights.transport=cuda-ipc", processes, EMULATED]);
        assert_eq!(ipc.weights.transport, WeightTransport::CudaIpc);
    }
}

#[test]
fn a_broadcast_is_between_gpus_that_differ() {
    let nccl = "weights.transport=nccl";
    let (trainer, sampler) = ("placement.trainer_device=cuda:0", "placement.rollout_device=cuda:1");
    refused(
        &["placement.device=cuda", nccl],
        "trainer and sampler are both on cuda:0, and `weights.transport` \"nccl\" takes a GPU for one of them alone",
        "set `placement.trainer_device` and `placement.rollout_device`",
    );
    let (processes, three) = ("placement.processes=true", "placement.rollout_workers=3");
    refused(
        &[trainer, sampler, nccl, processes, three],
        "several samplers are on cuda:1, and `weights.transport` \"nccl\" takes a GPU",
        "name a GPU for each in `placement.rollout_devices`",
    );
    let list = |devices: &str| format!("placement.rollout_devices=[{devices}]");
    refused(
        &[trainer, nccl, processes, three, &list("\"cuda:1\", \"cuda:2\", \"cuda:0\"")],
        "trainer and sampler are both on cuda:0",
        "GPUs that differ",
    );
    refused(
        &[trainer, nccl, processes, three, &list("\"cuda:1\", \"cuda:2\", \"cuda:1\"")],
        "several samplers are on cuda:1",
        "cuda-ipc",
    );
    refused(
        &[trainer, nccl],
        "`weights.transport` is \"nccl\", from device to device, but the sampler computes on the processor",
        "set `placement.device`",
    );
    refused(
        &[trainer, "trainer.world=2", "trainer.zero=3", "placement.rollout_device=cuda:2", nccl],
        "`weights.transport` \"nccl\" is of a rank that has all weights",
        "\"auto\"",
    );
    refused(
        &[EMULATED, nccl, "placement.policy=colocated"],
        "sampler and trainer take turns on one device (`placement.policy`)",
        "remove one of the two",
    );
    refused(
        &[EMULATED, nccl, processes],
        "emulated devices broadcast (`weights.transport` \"nccl\") within one process alone",
        "\"cuda-ipc\"",
    );
    if cfg!(feature = "emulator") {
        assert_eq!(recipe(&[EMULATED, nccl]).weights.transport, WeightTransport::Nccl);
        recipe(&[EMULATED, nccl, "trainer.world=2", "trainer.zero=2"]);
    }
    if cfg!(feature = "cuda") {
        recipe(&[trainer, sampler, nccl]);
        recipe(&[trainer, nccl, processes, three, &list("\"cuda:1\", \"cuda:2\", \"cuda:3\"")]);
        // Samplers of other machines have GPUs of other machines.
        recipe(&["placement.device=cuda", nccl, processes, "placement.rollout_workers=0"]);
    }
}

#[test]
fn a_list_of_devices_names_one_for_each_sampler() {
    let list = "placement.rollout_devices=[\"cuda:0\", \"cuda:0\"]";
    let (processes, two) = ("placement.processes=true", "placement.rollout_workers=2");
    refused(
        &[list, processes],
        "`placement.rollout_devices` names 2 devices for 1 samplers (`placement.rollout_workers`)",
        "one for each sampler",
    );
    refused(
        &[list, processes, two, "placement.rollout_device=cuda"],
        "both `placement.rollout_device` and `placement.rollout_devices` say where the sampler computes",
        "remove one",
    );
    refused(
        &["placement.rollout_devices=[\"cuda:0\", \"cpu\"]", processes, two],
        "`placement.rollout_devices` has the processor among devices",
        "devices alone",
    );
    refused(
        &["placement.rollout_devices=[\"cuda:0\"]"],
        "`placement.rollout_devices` has no effect without `placement.processes`",
        "placement.processes = true",
    );
    if cfg!(feature = "cuda") {
        // One GPU may have several samplers.
        let both = recipe(&[list, processes, two, "placement.trainer_device=cuda"]).devices();
        assert_eq!(both.rollouts, [Some(DeviceLocation::Cuda(0)); 2]);
        assert_eq!(both.rollout, Some(DeviceLocation::Cuda(0)));
    }
}

#[test]
fn a_list_of_devices_names_one_for_each_rank() {
    let list = "placement.trainer_devices=[\"cuda:0\", \"cuda:0\"]";
    let two = "trainer.world=2";
    refused(&[list, two], "`placement.trainer_devices` names \"cuda:0\" twice", "a GPU of its own");
    refused(&[list], "`placement.trainer_devices` names 2 devices for 1 ranks", "one for each rank");
    refused(
        &[list, two, "placement.trainer_device=cuda"],
        "both `placement.trainer_device` and `placement.trainer_devices`",
        "remove one",
    );
    refused(
        &["placement.trainer_devices=[\"cuda:0\", \"cpu\"]", two],
        "`placement.trainer_devices` has the processor among devices",
        "devices alone",
    );
}

#[test]
fn ranks_exchange_from_device_to_device_where_they_can() {
    let (two, wished) = ("trainer.world=2", "trainer.collective=device");
    refused(&[wished], "`trainer.collective` has no effect", "`placement.device` and `trainer.world`");
    refused(&["trainer.collective=host", EMULATED], "`trainer.collective` has no effect", "`trainer.world`");
    for (set, why) in [
        ("placement.policy=colocated", "they take turns with a sampler"),
        ("placement.optimizer=host", "`placement.optimizer` is \"host\""),
        ("trainer.ranks=processes", "some of them compute on the same device"),
    ] {
        let message = "`trainer.collective` is \"device\", but the workers cannot exchange there: ";
        refused(&[EMULATED, two, wished, set], &format!("{message}{why}"), "trainer.collective = \"auto\"");
    }
    let of = |degree| [EMULATED, two, degree];
    let stages = of("trainer.parallel.pipeline=2");
    recipe(&stages);
    let message = "`trainer.collective` is \"device\", but the workers cannot exchange there: stages send residual streams";
    refused(&[&stages[..], &[wished]].concat(), message, "trainer.collective = \"auto\"");
    let context = of("trainer.parallel.context=2");
    recipe(&[&context[..], &[wished]].concat());
    for (set, why) in [
        ("trainer.parallel.sections=4", "ranks on devices have one section of a micro-batch each"),
        ("trainer.parallel.exchange=keys", "context ranks on devices exchange heads"),
    ] {
        refused(&[&context[..], &[set]].concat(), why, "remove");
    }
    let mut recipe = recipe(&[two]);
    let meets = |recipe: &Recipe| (recipe.devices().meets, recipe.devices().optimizer_on_device);
    assert_eq!(meets(&recipe), (false, false));
    recipe.placement.device = DeviceWord::At(DeviceLocation::Cuda(0));
    assert_eq!(meets(&recipe), (true, true));
    recipe.trainer.collective = CollectiveWord::Host;
    assert_eq!(meets(&recipe), (false, false), "what exchanges through the host is updated there");
    recipe.trainer.world = 1;
    assert_eq!(meets(&recipe), (false, true), "one rank exchanges nothing");
}

#[test]
fn roles_are_where_the_most_specific_key_says() {
    let mut recipe = recipe(&["trainer.world=3", "algorithm.kl_coef=0.1"]);
    let cuda = |ordinal| Some(DeviceLocation::Cuda(ordinal));
    assert!(!recipe.devices().any());
    recipe.placement.device = DeviceWord::At(DeviceLocation::Cuda(1));
    let devices = recipe.devices();
    assert_eq!(devices.trainer, [cuda(1), cuda(2), cuda(3)]);
    assert_eq!((devices.rollout, devices.reference), (cuda(1), true));
    assert!(devices.optimizer_on_device);
    recipe.placement.trainer_device = Some(DeviceWord::At(DeviceLocation::Cuda(4)));
    recipe.placement.rollout_device = Some(DeviceWord::Cpu);
    let devices = recipe.devices();
    assert_eq!(devices.trainer, [cuda(4), cuda(5), cuda(6)]);
    assert_eq!((devices.rollout, devices.reference), (None, true));
    recipe.placement.device = DeviceWord::At(DeviceLocation::Emulated);
    recipe.placement.trainer_device = None;
    assert_eq!(recipe.devices().trainer, [Some(DeviceLocation::Emulated); 3]);
}

#[test]
fn values_are_stored_as_the_device_is_fast_with_unless_the_recipe_says_otherwise() {
    let mut recipe = recipe(&[]);
    let of = |recipe: &Recipe| {
        [None, Some(DeviceLocation::Emulated), Some(DeviceLocation::Cuda(0))]
            .map(|place| recipe.dtype_on(place))
    };
    assert_eq!(of(&recipe), [DeviceDtype::F32, DeviceDtype::F32, DeviceDtype::Bf16]);
    recipe.dtype = ModelDtype::Bf16;
    assert_eq!(of(&recipe), [DeviceDtype::F32, DeviceDtype::Bf16, DeviceDtype::Bf16]);
    recipe.dtype = ModelDtype::F32;
    assert_eq!(of(&recipe), [DeviceDtype::F32; 3]);
}

#[test]
fn ranks_beyond_all_bounds_are_refused_and_not_counted_up_to() {
    refused(&["trainer.world=9000000000000"], "`trainer.world` is 9000000000000, but a batch has only", "");
}

#[test]
fn the_resolved_recipe_says_where_roles_compute() {
    let mut recipe = recipe(&[]);
    let (_, origins) = Case::new(MINIMAL).load(&[], &[]).unwrap();
    let resolved = recipe.resolved_toml(&origins);
    assert!(
        resolved.contains("\ndevice = \"cpu\" ") && resolved.contains("\ndtype = \"auto\" "),
        "{resolved}"
    );
    assert!(!resolved.contains("optimizer = \"device\""), "{resolved}");
    recipe.placement.device = DeviceWord::At(DeviceLocation::Cuda(2));
    recipe.weights.transport = WeightTransport::CudaIpc;
    let resolved = recipe.resolved_toml(&origins);
    for line in ["\ndevice = \"cuda:2\" ", "\noptimizer = \"device\" ", "\ntransport = \"cuda-ipc\" "] {
        assert!(resolved.contains(line), "{line}: {resolved}");
    }
}
