//! Layouts of models, of which a search over settings asks for the same few thousands of times.
//!
//! Invariant: a layout is that of the shape which it is asked for.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use model::{Config, Layout};

/// Layouts that are kept; those asked for last.
const KEPT: usize = 8;

thread_local! {
    static KNOWN: RefCell<VecDeque<(Config, Rc<Layout>)>> = const { RefCell::new(VecDeque::new()) };
}

/// The layout of a model of the shape `config`, computed once while it is among those that are kept.
pub(super) fn layout_of(config: &Config) -> Rc<Layout> {
    KNOWN.with_borrow_mut(|known| {
        if let Some(at) = known.iter().position(|(of, _)| of == config) {
            let found = known.remove(at);
            known.extend(found);
        } else {
            if known.len() == KEPT {
                known.pop_front();
            }
            known.push_back((config.clone(), Rc::new(Layout::new(config))));
        }
        known.back().map_or_else(|| Rc::new(Layout::new(config)), |(_, layout)| Rc::clone(layout))
    })
}

#[cfg(test)]
mod tests {
    use model::Sizes;

    use super::*;

    #[test]
    fn a_layout_is_computed_once_and_is_that_of_its_shape() {
        let shape = |hidden_size| {
            Config::fresh(&Sizes {
                vocab_size: 20,
                hidden_size,
                intermediate_size: 16,
                num_layers: 1,
                num_heads: 2,
                num_kv_heads: 1,
                max_position_embeddings: 16,
            })
        };
        let first = layout_of(&shape(8));
        assert!(Rc::ptr_eq(&first, &layout_of(&shape(8))));
        for hidden_size in (10..30).step_by(2) {
            assert_eq!(layout_of(&shape(hidden_size)).len(), Layout::new(&shape(hidden_size)).len());
        }
        assert!(!Rc::ptr_eq(&first, &layout_of(&shape(8))), "it was given up for others");
        assert_eq!(first.len(), layout_of(&shape(8)).len());
    }
}
