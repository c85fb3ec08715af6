//! Layers that come one at a time, and gradients that are handed on one unit at a time.

use std::sync::Arc;

use model::{
    Decoder, GradientSink, Gradients, LayerSource, Layout, Parameters, PredictionGradient, Recompute,
    SharedCores, Target, ThreadPool, TrainedTargets, Unit,
};

use crate::common::{Golden, MODELS, bits, pack_of, recorded, samples, train};

/// Layers cut out of whole parameters, with the order in which they were asked for.
struct Cut<'a> {
    parameters: &'a Parameters,
    asked: Vec<usize>,
}

impl LayerSource for Cut<'_> {
    fn layer(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        self.asked.push(index);
        Ok(unit(self.parameters, Unit::Layer(index)))
    }
}

/// Gradients of each unit apart, with what was said of them.
struct Apart {
    layout: Arc<Layout>,
    units: Vec<Vec<f32>>,
    /// A unit that was asked for, or is done.
    said: Vec<(Unit, bool)>,
}

impl GradientSink for Apart {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        assert!(!self.said.contains(&(unit, true)), "{unit:?} is done already");
        self.said.push((unit, false));
        let place = self.layout.units().position(|other| other == unit).unwrap();
        &mut self.units[place]
    }

    fn done(&mut self, unit: Unit) {
        self.said.push((unit, true));
    }
}

fn unit(parameters: &Parameters, unit: Unit) -> Arc<Vec<f32>> {
    Arc::new(parameters.values()[parameters.layout().unit(unit)].to_vec())
}

#[test]
fn layers_that_come_one_at_a_time_give_the_same_bits() {
    for name in MODELS {
        let golden = Golden::open(name);
        let (config, parameters) = (&golden.config, Arc::new(golden.parameters.clone()));
        let layout = parameters.layout();
        let pack = pack_of((0..12).map(|i| &golden.sequences[i % golden.sequences.len()].tokens[..]));
        let rows: Vec<usize> = (0..pack.token_ids().len()).step_by(2).collect();
        let target = |row: &usize| Target { token: (row % 50) as u32, temperature: 0.8, kept: None };
        let targets: Vec<_> = rows.iter().map(target).collect();
        let slopes: Vec<_> = (0..rows.len())
            .map(|i| PredictionGradient { logprob: 0.1 * i as f32 - 0.3, entropy: 0.02, value: 0.0 })
            .collect();
        for (recompute, threads) in
            [(Recompute::None, 1), (Recompute::Block, 2), (Recompute::Sequence, 1), (Recompute::None, 3)]
        {
            let pool = ThreadPool::new(&SharedCores::new(threads), threads);
            let whole = Decoder::trainable(config, &parameters, recompute);
            let mut flat = Gradients::zeros(layout);
            let expected = train(&whole, &pack, (&rows, &targets), &slopes, &mut flat, &pool);

            let [embedding, tail] = [Unit::Embedding, Unit::Tail].map(|of| unit(&parameters, of));
            let decoder = Decoder::without_layers(config, layout, &embedding, &tail, recompute);
            let mut source = Cut { parameters: &parameters, asked: Vec::new() };
            let scored = decoder.score_through(&mut source, &pack, &rows, &targets, &pool).unwrap();
            source.asked.clear();
            let units = layout.units().map(|unit| vec![0.0; layout.unit(unit).len()]).collect();
            let mut apart = Apart { layout: Arc::clone(layout), units, said: Vec::new() };
            let samples = samples(rows.len());
            let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &samples };
            let mut predicted = Vec::new();
            let mut slopes_of = recorded(&samples, &slopes, &mut predicted);
            decoder.train_through(&mut source, &pack, trained, &mut slopes_of, &mut apart, &pool).unwrap();
            drop(slopes_of);
            assert_eq!((&scored, &predicted), (&expected, &expected), "{name}");
            assert_eq!(bits(&apart.units.concat()), bits(flat.values()), "{name} {recompute:?}");
            let up = 0..config.num_layers();
            assert_eq!(source.asked, up.clone().chain(up.rev()).collect::<Vec<_>>());
            done_in_order(layout, &apart.said);
        }
    }
}

/// Every unit is done before the next is asked for, so that it can be handed on meanwhile.
fn done_in_order(layout: &Layout, said: &[(Unit, bool)]) {
    let done: Vec<Unit> = said.iter().filter(|(_, done)| *done).map(|(unit, _)| *unit).collect();
    let mut expected: Vec<Unit> = layout.units().collect();
    let embedding = expected.remove(0);
    expected.reverse();
    expected.push(embedding);
    assert_eq!(done, expected);
    let place = |wanted| said.iter().position(|said| *said == wanted).unwrap();
    for pair in expected[..expected.len() - 1].windows(2) {
        assert!(place((pair[0], true)) < place((pair[1], false)), "{pair:?}: {said:?}");
    }
}
