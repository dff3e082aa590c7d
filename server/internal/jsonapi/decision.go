package jsonapi

import (
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Decision is client.Decision in JSON: times are seconds, and null for never.
type Decision struct {
	Allowed    bool     `json:"allowed"`
	Remaining  int64    `json:"remaining"`
	RetryAfter *Seconds `json:"retry_after"`
	ResetAfter *Seconds `json:"reset_after"`
	Capacity   int64    `json:"capacity"`
	Replayed   bool     `json:"replayed"`
	Shadowed   bool     `json:"shadowed"`
	Estimated  bool     `json:"estimated,omitzero"` // there only where it is true
}

// NewDecision converts d.
func NewDecision(d client.Decision) Decision {
	j := Decision{Allowed: d.Allowed, Remaining: d.Remaining, Capacity: d.Capacity, Replayed: d.Replayed, Shadowed: d.Shadowed, Estimated: d.Estimated}
	if !d.Never() {
		j.RetryAfter = (*Seconds)(&d.RetryAfter)
	}
	if !d.NeverFull() {
		j.ResetAfter = (*Seconds)(&d.ResetAfter)
	}
	return j
}

// A JointDecision is client.JointDecision in JSON.
type JointDecision struct {
	Decision
	Binding   int        `json:"binding"`
	Decisions []Decision `json:"decisions"`
}

// NewJointDecision converts d.
func NewJointDecision(d client.JointDecision) JointDecision {
	j := JointDecision{Decision: NewDecision(d.Decision), Binding: d.Binding, Decisions: make([]Decision, len(d.Decisions))}
	for i := range d.Decisions {
		j.Decisions[i] = NewDecision(d.Decisions[i])
	}
	return j
}

// Seconds is a time in whole microseconds, written exactly as a number of seconds.
type Seconds time.Duration

// MarshalJSON writes as few digits as possible.
func (s Seconds) MarshalJSON() ([]byte, error) {
	whole, micros := s/Seconds(time.Second), s%Seconds(time.Second)/Seconds(time.Microsecond)
	text := strconv.AppendInt(nil, int64(whole), 10)
	if micros == 0 {
		return text, nil
	}
	point := len(text)
	text = strconv.AppendInt(text, 1_000_000+int64(micros), 10) // a 1, and six digits
	text[point] = '.'
	for text[len(text)-1] == '0' {
		text = text[:len(text)-1]
	}
	return text, nil
}
