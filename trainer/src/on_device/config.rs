//! The device that a rank computes on, and the state that the device has.
//!
//! Invariant: the device of a rank is a function of the configuration and the rank number.

use std::sync::Arc;

use device::device::DeviceLocation;
use model::on_device::DeviceDtype;
use serde::{Deserialize, Serialize};

/// Where ranks compute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// Device of the first rank. Further ranks have the GPUs that follow it.
    #[serde(with = "text")]
    pub place: DeviceLocation,
    /// Devices of the ranks in order, repeated if there are more ranks; empty for the devices that follow `place`.
    #[serde(with = "texts", default = "nowhere")]
    pub places: Arc<[DeviceLocation]>,
    /// Dtype of the weights in a pass and of activations. Master weights are always f32.
    pub dtype: DeviceDtype,
    /// Where the weights are updated.
    pub optimizer: OptimizerPlace,
    /// Where ranks exchange gradients and weights.
    pub collective: CollectivePlace,
    /// Where the weights of a frozen network are.
    #[serde(default)]
    pub frozen: FrozenPlace,
}

/// Where ranks that compute on devices exchange gradients and weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectivePlace {
    /// From device to device if the devices can form a group, otherwise through the host.
    #[default]
    Auto,
    /// From device to device, by NCCL. Every rank needs its own GPU, and updates the weights there with AdamW; ranks that compute passes
    /// together exchange there in passes alone.
    Device,
    /// Through the host.
    Host,
}

/// Where the optimizer has its state and updates the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerPlace {
    /// On the device, if the optimizer is AdamW with f32 moments on all weights, and the rank is single or in a device
    /// group; otherwise on the host.
    #[default]
    Device,
    /// On the host: 12 bytes per weight less on the device; gradients and weights are copied in every step.
    Host,
}

/// Where a network that is not trained has its weights. Every rank has all of them, whatever it has of the network that is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FrozenPlace {
    /// On the device; those that are swapped in, during a scoring pass.
    #[default]
    Device,
    /// On the host (offloading): a layer is copied to the device when a micro-batch needs it, and replaces the layer before. Ranks that
    /// are threads of a process share one copy.
    Host,
}

impl DeviceConfig {
    /// All state on one device, or on the devices that follow it.
    #[must_use]
    pub fn new(place: DeviceLocation, dtype: DeviceDtype) -> Self {
        let (optimizer, collective) = (OptimizerPlace::Device, CollectivePlace::Auto);
        Self { place, places: nowhere(), dtype, optimizer, collective, frozen: FrozenPlace::Device }
    }

    /// The device of a rank.
    #[must_use]
    pub fn place_of(&self, rank: usize) -> DeviceLocation {
        match (self.place, self.places.len()) {
            (DeviceLocation::Cuda(first), 0) => DeviceLocation::Cuda(first + rank),
            (place, 0) => place,
            (_, places) => self.places[rank % places],
        }
    }
}

fn nowhere() -> Arc<[DeviceLocation]> {
    Arc::default()
}

/// A device as text.
mod text {
    use device::device::DeviceLocation;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(place: &DeviceLocation, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(place)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<DeviceLocation, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Devices as texts.
mod texts {
    use std::sync::Arc;

    use device::device::DeviceLocation;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(
        places: &Arc<[DeviceLocation]>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(places.iter().map(DeviceLocation::to_string))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<[DeviceLocation]>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| text.parse()).collect::<Result<_, _>>().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_consecutive_devices_or_the_listed_ones() {
        let mut config = DeviceConfig::new(DeviceLocation::Cuda(2), DeviceDtype::Bf16);
        assert_eq!([0, 1, 3].map(|rank| config.place_of(rank)), [2, 3, 5].map(DeviceLocation::Cuda));
        config.places = [DeviceLocation::Cuda(5), DeviceLocation::Cuda(1)].into();
        assert_eq!([0, 1, 2].map(|rank| config.place_of(rank)), [5, 1, 5].map(DeviceLocation::Cuda));
        let emulated = DeviceConfig::new(DeviceLocation::Emulated, DeviceDtype::F32);
        assert_eq!(emulated.place_of(3), DeviceLocation::Emulated);
    }

    #[test]
    fn a_configuration_round_trips_through_a_message() {
        let mut config = DeviceConfig::new(DeviceLocation::Cuda(2), DeviceDtype::Bf16);
        config.places = [DeviceLocation::Cuda(5), DeviceLocation::Emulated].into();
        config.frozen = FrozenPlace::Host;
        for config in [config, DeviceConfig::new(DeviceLocation::Emulated, DeviceDtype::F32)] {
            let message = crate::lead::encode(&config).unwrap();
            assert_eq!(crate::lead::decode::<DeviceConfig>(&message).unwrap(), config);
        }
    }
}
