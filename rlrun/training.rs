//! Training without a recipe, from Rust: load a model, make passes and updates, sample, save. `examples/train_by_hand.rs` is a whole
//! program.

pub use model::{SharedCores, SpecialTokens};
pub use service::base::BaseModel;
pub use service::data::{
    AdamParameters, Datum, LossSetting, LossTensor, LossValues, PassOutput, PassRequest, SampledTokens,
    SamplingOutput, SamplingRequest, StopForm,
};
pub use service::model_sampler::ModelSampler;
pub use service::outcome::FailedRequest;
pub use service::trained::{SamplingWeights, TrainedModel};
pub use service::training::LoraRequest;
