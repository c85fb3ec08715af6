//! The model of this crate's tests: two layers of random weights that make clear choices. Invariant: equal in all of them.

use std::path::{Path, PathBuf};

use model::{Config, ModelDirectory, Sizes, WeightDtype};

/// Its path in `directory`, where it is written if it is missing.
pub(crate) fn tiny_model(directory: &Path, dtype: WeightDtype) -> PathBuf {
    let path = directory.join("model");
    if !path.exists() {
        let mut config = Config::fresh(&Sizes {
            vocab_size: 100,
            hidden_size: 32,
            intermediate_size: 48,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 512,
        });
        config.initializer_range = 0.3;
        let fresh = ModelDirectory::fresh(&directory.join("fresh"), &config, 11).unwrap();
        fresh.export(&path, &fresh.load_parameters().unwrap(), dtype).unwrap();
    }
    path
}
