//! The device of a command that has no recipe.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use device::device::DeviceLocation;
use model::on_device::DeviceDtype;

use crate::failure::Failure;

/// Device of a command.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct DeviceArgs {
    /// Compute on a device, such as cuda or cuda:1, instead of the processor
    #[arg(long, value_parser = str::parse::<DeviceLocation>)]
    pub device: Option<DeviceLocation>,
    /// Number format of weights and activations on the device: f32 or bf16 [default: bf16 on a GPU]
    #[arg(long, value_parser = dtype())]
    pub dtype: Option<DeviceDtype>,
}

impl DeviceArgs {
    /// The device and its number format; `None` for the processor.
    ///
    /// # Errors
    /// A number format that only devices support, without a device.
    pub fn device(&self) -> Result<Option<(DeviceLocation, DeviceDtype)>, Failure> {
        match (self.device, self.dtype) {
            (None, None | Some(DeviceDtype::F32)) => Ok(None),
            (None, Some(DeviceDtype::Bf16)) => {
                let what = "--dtype bf16 needs --device: the processor computes in f32".to_owned();
                Err(Failure::Argument(what))
            }
            (Some(place @ DeviceLocation::Cuda(_)), dtype) => {
                Ok(Some((place, dtype.unwrap_or(DeviceDtype::Bf16))))
            }
            (Some(place), dtype) => Ok(Some((place, dtype.unwrap_or(DeviceDtype::F32)))),
        }
    }
}

/// The words of `model.dtype` that name a type.
fn dtype() -> impl TypedValueParser<Value = DeviceDtype> {
    PossibleValuesParser::new(["f32", "bf16"])
        .map(|word| if word == "f32" { DeviceDtype::F32 } else { DeviceDtype::Bf16 })
}
