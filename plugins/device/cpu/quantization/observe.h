#pragma once
// How observations (quern/step_state.h) add up, for the ops that make them: observe_scale and lm_loss_train.

#include "quern/step_state.h"

namespace quern::cpu {

/// Of nothing: what observations are added to.
ScaleObservation no_observation();
void merge(const ScaleObservation& more, ScaleObservation& into);

}  // namespace quern::cpu
