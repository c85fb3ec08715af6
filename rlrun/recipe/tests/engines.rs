//! Rollout engines of others in a recipe: what is refused, and by which name.

use rollout::remote::EngineKind;

use super::{Case, MINIMAL};

const VLLM: [&str; 2] = ["rollout.engine=vllm", "rollout.urls=[\"http://127.0.0.1:8000\"]"];

/// The errors of the recipe with vLLM.
fn refused(set: &str, message: &str) {
    let shown = Case::new(MINIMAL).errors(&[&VLLM[..], &[set]].concat(), &[]);
    assert!(shown.contains("error: ") && shown.contains(message), "{set}: {shown}");
}

#[test]
fn keys_of_the_own_engine_are_refused_with_engines_of_others() {
    let (recipe, _) = Case::new(MINIMAL).load(&VLLM, &[]).unwrap();
    assert_eq!(recipe.engine_kind(), Some(EngineKind::Vllm));
    refused(
        "rollout.top_p=0.9",
        "has no effect with `rollout.engine`: engines do not say which tokens truncation left",
    );
    refused("rollout.stop=[\"x\"]", "see no text");
    refused("rollout.quantization=int8", "an engine is started with its own quantization");
    refused("rollout.tensor=2", "an engine is started with its own tensor degree");
    refused("rollout.adapt_running=true", "an engine decides itself what it runs at once");
    refused("rollout.bitwise=true", "compute other bits than the trainer");
    refused("placement.processes=true", "there are no rollout workers");
    refused("rollout.urls=[]", "there is no address");
    refused("rollout.urls=[\"127.0.0.1:8000\"]", "which is no address");
    refused("rollout.probe_bound=0", "rollout.probe_bound");
    refused("rollout.push_adapter=true", "pushes a LoRA adapter, and the run trains none");
    let two = "rollout.urls=[\"http://a:1\", \"http://b:1\"]";
    let shown = Case::new(MINIMAL).errors(&["rollout.engine=sglang", two, "rollout.command=[\"x\"]"], &[]);
    assert!(shown.contains("starts one engine, and there are several addresses"), "{shown}");
    let shown =
        Case::new(MINIMAL).errors(&["rollout.engine=sglang", VLLM[1], "rollout.push_adapter=true"], &[]);
    assert!(shown.contains("is for vLLM, and `rollout.engine` is \"sglang\""), "{shown}");
    let ends = "lora.target_modules=[\"q_proj\", \"lm_head\"]";
    let shown = Case::new(MINIMAL).errors(&[VLLM[0], VLLM[1], "rollout.push_adapter=true", ends], &[]);
    assert!(shown.contains("`lora.target_modules` names \"lm_head\""), "{shown}");
}

#[test]
fn keys_of_engines_are_refused_without_one() {
    let (recipe, _) = Case::new(MINIMAL).load(&[], &[]).unwrap();
    assert_eq!(recipe.engine_kind(), None);
    for set in [
        "rollout.urls=[\"http://127.0.0.1:8000\"]",
        "rollout.command=[\"vllm\"]",
        "rollout.weights_dir=w",
        "rollout.push_adapter=true",
    ] {
        let shown = Case::new(MINIMAL).errors(&[set], &[]);
        assert!(shown.contains("is for engines of others, and `rollout.engine` is \"own\""), "{shown}");
    }
}
