//! The cases of the contract of `Producer` and `Consumer`. Invariant: a case uses these two traits alone, so it holds for any
//! store and over HTTP.

mod admissions;
mod leases;
mod order;
mod quarantine;
mod staleness;

use super::ContractCase;
use super::fixtures::config;
use crate::{BufferConfig, OnStale, Order};

/// A case is its function, its name, and the configuration of its buffer.
macro_rules! case {
    ($about:ident::$name:ident, $config:expr) => {
        ContractCase { name: stringify!($name), config: || $config, check: $about::$name }
    };
}

/// All cases.
pub(super) const CASES: &[ContractCase] = &[
    case!(leases::a_leased_group_equals_the_finalized_one, config(2, 1)),
    case!(admissions::finalize_is_idempotent, config(2, 1)),
    case!(admissions::one_of_many_simultaneous_finalize_calls_is_accepted, config(2, 1)),
    case!(admissions::a_call_in_the_wrong_state_names_the_state, config(2, 1)),
    case!(admissions::aborted_groups_free_their_slots_and_are_requeued, config(2, 1)),
    case!(admissions::a_slot_is_free_once_the_sampler_serves_the_next_version, config(2, 1)),
    case!(order::fifo_order_leases_the_oldest_groups_first_sorted_by_id, config(2, 1)),
    case!(leases::a_step_gets_the_same_batch_until_it_is_acknowledged, config(2, 1)),
    case!(leases::a_released_lease_can_be_leased_again, config(2, 1)),
    case!(leases::calls_on_an_ended_lease_are_idempotent, config(2, 1)),
    case!(staleness::impossible_versions_are_refused_and_change_nothing, config(2, 1)),
    case!(leases::a_rewound_trainer_gets_its_steps_again_and_nothing_is_dropped, config(2, 1)),
    case!(admissions::an_idempotency_key_stores_a_group_once_without_admission, config(2, 1)),
    case!(admissions::a_keyed_group_without_a_free_slot_is_refused_as_full, config(2, 1)),
    case!(
        admissions::the_limit_of_bytes_refuses_groups_until_some_are_acknowledged,
        BufferConfig { max_bytes: 4096, ..config(8, 8) }
    ),
    case!(staleness::versions_from_the_future_are_refused, config(2, 1)),
    case!(leases::an_expired_lease_is_fenced_once_its_groups_are_leased_again, config(2, 1)),
    case!(leases::an_expired_lease_can_be_resumed_before_its_groups_are_leased_again, config(2, 1)),
    case!(admissions::an_expired_admission_is_requeued_and_its_late_group_accepted, config(2, 1)),
    case!(admissions::what_a_sampler_abandons_is_admitted_again, config(2, 0)),
    case!(leases::several_consumers_share_a_step, config(2, 1)),
    case!(leases::a_lease_is_limited_by_tokens_and_by_available_groups, config(2, 1)),
    case!(staleness::a_request_can_have_a_stricter_staleness_bound, config(2, 1)),
    case!(
        leases::a_group_is_leased_max_uses_times_and_once_a_step,
        BufferConfig { on_stale: OnStale::Drop, max_uses: 2, ..config(2, 3) }
    ),
    case!(
        order::recency_order_leases_the_newest_groups_first,
        BufferConfig { on_stale: OnStale::Drop, order: Order::Recency, ..config(2, 3) }
    ),
    case!(
        order::reward_order_leases_the_best_groups_first,
        BufferConfig { on_stale: OnStale::Drop, order: Order::Reward { temperature: 1e-3 }, ..config(2, 3) }
    ),
    case!(admissions::dedup_drops_stored_trajectories, BufferConfig { dedup: true, ..config(2, 1) }),
    case!(
        staleness::stale_groups_are_dropped_and_generated_again,
        BufferConfig { on_stale: OnStale::Drop, ..config(2, 1) }
    ),
    case!(quarantine::a_quarantined_group_leaves_its_lease_and_frees_its_slot, config(2, 1)),
    case!(leases::a_lease_timeout_explains_what_is_missing, config(2, 1)),
    case!(leases::a_lease_that_waits_for_slow_groups_is_explained, config(2, 1)),
    case!(leases::waits_end_when_the_other_side_acts, config(2, 1)),
    case!(staleness::threads_train_every_group_once_and_within_the_bound, config(2, 1)),
    case!(order::synchronous_batches_are_the_tasks_in_order, config(2, 0)),
];
