//! Experts that ranks divide (expert parallel; GShard, Lepikhin et al. 2020, arXiv 2006.16668): the rows of tokens go to the ranks of
//! their experts, and results come back.
//!
//! Invariant: every rank makes the calls of every layer with experts, whatever it has of tokens. The host has to know how many rows
//! come, so it waits for the router of each of these layers.

use std::ops::Range;

use collective::CollectiveError;
use device::ops::routes::{RouteMemory, RoutedRows, Router};
use device::ops::rows::gather_rows;
use device::{DeviceBuffer, Result, Storage, View};

use super::DeviceLayer;
use crate::on_device::experts::DeviceExperts;
use crate::on_device::ranks::{DeviceExpertRanks, DeviceRanks};

/// The rows that the experts of this rank compute: by the rank of the token, then by expert, then in the order of tokens.
#[derive(Debug)]
pub(super) struct DividedRows<T: Storage> {
    router: Router,
    len: usize,
    routes: RouteMemory,
    /// `[T k]` the token of each row of the tokens of this rank, grouped by expert.
    tokens: DeviceBuffer<u32>,
    /// Rows of the tokens of this rank, by the rank of their experts.
    sent: Vec<Range<usize>>,
    /// Rows of the experts of this rank, by the rank of their tokens.
    received: Vec<Range<usize>>,
    /// `[rows, d]` their inputs.
    inputs: DeviceBuffer<T>,
    calls: DeviceRanks,
}

/// Rows that are sent and received, by rank.
#[derive(Clone, Copy)]
struct RowPlaces<'a> {
    sent: &'a [Range<usize>],
    received: &'a [Range<usize>],
}

impl<T: Storage> DividedRows<T> {
    /// Where the rows go among the experts of this rank.
    pub(super) fn routes(&self) -> RoutedRows<'_> {
        self.routes.routes(self.router, self.len)
    }

    /// `[rows, d]` their inputs, in the order of slots.
    pub(super) fn inputs(&self) -> View<'_, T> {
        self.inputs.all()
    }

    fn to_experts(&self) -> RowPlaces<'_> {
        RowPlaces { sent: &self.sent, received: &self.received }
    }

    fn to_tokens(&self) -> RowPlaces<'_> {
        RowPlaces { sent: &self.received, received: &self.sent }
    }
}

/// Where the rows of each of `counts [n, each]` begin and end.
fn places(counts: &[u32], each: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |counts: &[u32]| {
        let start = end;
        end += counts.iter().map(|rows| *rows as usize).sum::<usize>();
        start..end
    };
    counts.chunks_exact(each).map(place).collect()
}

/// The same places of values, `width` for each row.
fn of_values(rows: &[Range<usize>], width: usize) -> Vec<Range<usize>> {
    rows.iter().map(|rows| rows.start * width..rows.end * width).collect()
}

impl<T: Storage> DeviceLayer<'_, T> {
    /// Sends the tokens `x [T, d]` to their experts. `None` if this rank has all experts. Waits for the router.
    pub(super) fn dispatch(
        &self,
        experts: &DeviceExperts<'_, T>,
        routes: &RoutedRows<'_>,
        x: View<'_, T>,
    ) -> Result<Option<DividedRows<T>>> {
        let Some(ranks) = &self.decoder.ranks.expert else { return Ok(None) };
        let (device, router) = (self.on(), experts.own_router());
        // A download has no deadline, and another rank may be lost.
        self.decoder.wait_for_ranks()?;
        let load = device.download(routes.counters.slice(0..experts.spec.count))?;
        let slots = device.download(routes.slots)?;
        let of_own = exchanged_counts(ranks, &load, router.experts)?;
        let (sent, received) = (places(&load, router.experts), places(&of_own, router.experts));
        let of_rank = |counts: &[u32]| -> Vec<u32> {
            let rows = (0..).zip(counts).map(|(expert, rows)| std::iter::repeat_n(expert, *rows as usize));
            rows.flatten().collect()
        };
        let of_rows: Vec<u32> = of_own.chunks_exact(router.experts).flat_map(of_rank).collect();
        let tokens: Vec<u32> = slots.iter().map(|slot| slot / routes.router.per_token as u32).collect();
        // An upload may wait, so it comes before the rows are on their way.
        let own_routes = RouteMemory::of_rows::<T>(device, router, &of_rows)?;
        let tokens = device.upload(&tokens)?;
        let places = RowPlaces { sent: &sent, received: &received };
        let inputs = self.rows_to_experts(&ranks.exchange, (&tokens, places), x)?;
        let (len, calls) = (of_rows.len(), ranks.exchange.clone());
        Ok(Some(DividedRows { router, len, routes: own_routes, tokens, sent, received, inputs, calls }))
    }

    /// `[rows, d]` for the experts of this rank, of values `x [T, d]` of `tokens`, one for each row.
    fn rows_to_experts(
        &self,
        calls: &DeviceRanks,
        (tokens, places): (&DeviceBuffer<u32>, RowPlaces<'_>),
        x: View<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let mut grouped = self.on().uninit(tokens.len() * self.hidden())?;
        gather_rows(self.on(), x, tokens.all(), self.hidden(), grouped.all_mut())?;
        self.exchange_rows(calls, grouped.all(), self.hidden(), places)
    }

    /// The gradient `g [T, d]` of the result of tokens for the experts of this rank, `[rows, d]`, and what results of rows are multiplied
    /// with, of `routes`, those of the tokens.
    pub(super) fn dispatch_gradient(
        &self,
        rows: &mut DividedRows<T>,
        routes: &RoutedRows<'_>,
        g: View<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let device = self.on();
        let mut grouped = device.uninit::<f32>(rows.tokens.len())?;
        gather_rows(device, routes.weights, routes.slots, 1, grouped.all_mut())?;
        let weights = self.exchange_rows(&rows.calls, grouped.all(), 1, rows.to_experts())?;
        device.copy(weights.all(), rows.routes.weights(rows.router, rows.len))?;
        self.rows_to_experts(&rows.calls, (&rows.tokens, rows.to_experts()), g)
    }

    /// Sends the values of rows, `x [rows, d]`, which are grouped by expert, back to the ranks of their tokens: `[T k, d]`, grouped by
    /// expert.
    pub(super) fn combine(&self, rows: &DividedRows<T>, x: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let mut of_slots = self.on().uninit(x.len())?;
        gather_rows(self.on(), x, rows.routes().rows, self.hidden(), of_slots.all_mut())?;
        self.exchange_rows(&rows.calls, of_slots.all(), self.hidden(), rows.to_tokens())
    }

    /// The gradients `[T, k]` of the weights of the slots of tokens, from those of rows, `d_weights [rows]`.
    pub(super) fn combine_weights(
        &self,
        rows: &DividedRows<T>,
        routes: &RoutedRows<'_>,
        d_weights: View<'_, f32>,
    ) -> Result<DeviceBuffer<f32>> {
        let grouped = self.exchange_rows(&rows.calls, d_weights, 1, rows.to_tokens())?;
        let mut of_slots = self.on().uninit(grouped.len())?;
        gather_rows(self.on(), grouped.all(), routes.rows, 1, of_slots.all_mut())?;
        Ok(of_slots)
    }

    /// The rows that ranks send this one, of `x [rows, width]`.
    fn exchange_rows<V: Storage>(
        &self,
        calls: &DeviceRanks,
        x: View<'_, V>,
        width: usize,
        RowPlaces { sent, received }: RowPlaces<'_>,
    ) -> Result<DeviceBuffer<V>> {
        let (sends, receives) = (of_values(sent, width), of_values(received, width));
        self.decoder.ranks.all_to_all(calls, self.on(), x, &sends, &receives)
    }
}

/// The rows of the experts of this rank, `[world, each]`, for those of this rank's tokens, `load [experts]`.
fn exchanged_counts(ranks: &DeviceExpertRanks, load: &[u32], each: usize) -> Result<Vec<u32>> {
    let places: Vec<_> = (0..ranks.counts.world()).map(|peer| peer * each..(peer + 1) * each).collect();
    // Values are moved unchanged, whatever their bits mean.
    let sent: Vec<f32> = load.iter().map(|rows| f32::from_bits(*rows)).collect();
    let mut received = vec![0.0; load.len()];
    ranks
        .counts
        .all_to_all(&sent, &places, &mut received, &places)
        .map_err(CollectiveError::into_device_error)?;
    Ok(received.into_iter().map(f32::to_bits).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_ranks_follow_one_another() {
        assert_eq!(places(&[2, 0, 1, 3, 0, 0], 2), [0..2, 2..6, 6..6]);
        assert_eq!(of_values(&[0..2, 2..6], 3), [0..6, 6..18]);
    }
}
