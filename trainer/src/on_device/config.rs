//! Which device a rank computes on, and what is kept there.
//!
//! Invariant: the place of a rank follows from the configuration and its number, so that ranks need not agree on it.

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
    /// Devices of the ranks in their order, and over again if there are more ranks; empty for those that follow `place`.
    #[serde(with = "texts", default = "nowhere")]
    pub places: Arc<[DeviceLocation]>,
    /// What weights are computed with, and activations kept in. What is trained is f32 whatever this is.
    pub dtype: DeviceDtype,
    /// Where the weights are updated.
    pub optimizer: OptimizerPlace,
    /// Where ranks exchange gradients and weights.
    pub collective: CollectivePlace,
}

/// Where ranks that compute on devices exchange gradients and weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectivePlace {
    /// From device to device where that can be, through the host where not.
    #[default]
    Auto,
    /// From device to device: by NCCL, where every rank has a GPU of its own and updates weights with AdamW there.
    Device,
    /// Through the host.
    Host,
}

/// Where the optimizer has its state and updates the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerPlace {
    /// On the device, if it is AdamW with f32 moments on all weights, of a rank that is alone or exchanges with others from
    /// device to device; on the host otherwise.
    #[default]
    Device,
    /// On the host: 12 bytes per weight less on the device, and gradients and weights on the way between them.
    Host,
}

impl DeviceConfig {
    /// Everything on one device, or on those that follow it.
    #[must_use]
    pub fn new(place: DeviceLocation, dtype: DeviceDtype) -> Self {
        let (optimizer, collective) = (OptimizerPlace::Device, CollectivePlace::Auto);
        Self { place, places: nowhere(), dtype, optimizer, collective }
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

/// A place as people write it.
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

/// Places as people write them.
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
    fn ranks_have_the_devices_that_follow_or_those_that_are_listed() {
        let mut config = DeviceConfig::new(DeviceLocation::Cuda(2), DeviceDtype::Bf16);
        assert_eq!([0, 1, 3].map(|rank| config.place_of(rank)), [2, 3, 5].map(DeviceLocation::Cuda));
        config.places = [DeviceLocation::Cuda(5), DeviceLocation::Cuda(1)].into();
        assert_eq!([0, 1, 2].map(|rank| config.place_of(rank)), [5, 1, 5].map(DeviceLocation::Cuda));
        let emulated = DeviceConfig::new(DeviceLocation::Emulated, DeviceDtype::F32);
        assert_eq!(emulated.place_of(3), DeviceLocation::Emulated);
    }

    #[test]
    fn a_configuration_comes_out_of_a_message_as_it_went_in() {
        let mut config = DeviceConfig::new(DeviceLocation::Cuda(2), DeviceDtype::Bf16);
        config.places = [DeviceLocation::Cuda(5), DeviceLocation::Emulated].into();
        for config in [config, DeviceConfig::new(DeviceLocation::Emulated, DeviceDtype::F32)] {
            let message = crate::lead::encode(&config).unwrap();
            assert_eq!(crate::lead::decode::<DeviceConfig>(&message).unwrap(), config);
        }
    }
}
