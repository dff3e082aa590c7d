package service

import (
	"cmp"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// DefaultPolicy is the policy of a request without one.
const DefaultPolicy = "default"

// A Request is about one bucket. The call decides which fields are obligatory.
type Request struct {
	Policy         string // DefaultPolicy if empty
	Key            string
	Cost           *int64
	IdempotencyKey *string
	Holder         string // of slots
	AtLeast        *int64 // of AcquireUpTo, which takes at most Cost
	Time           *Time  // the longest wait of Reserve; the length of a Pause
}

// A JointRequest is about several buckets. Its charges have no idempotency keys of their own.
type JointRequest struct {
	Charges        []Request
	IdempotencyKey *string
}

// A Time is one that a caller gives. One that the database accepts nowhere has a Text, as the caller wrote it.
type Time struct {
	time.Duration
	Text string
}

// MaxTime bounds the times that have no Text, in seconds.
const MaxTime = 1e9

// check returns the error of an argument that the client cannot send: null, or too long a time.
func (r Request) check(o Operation) *Error {
	switch {
	case o == Settle && r.IdempotencyKey == nil:
		return missing("idempotency_key")
	case (o == Charge || o == Settle) && r.Cost == nil:
		return missing("cost")
	case o == AcquireUpTo && r.Cost == nil:
		return missing("at_most")
	case o == Refund && r.Cost == nil:
		return missing("amount")
	case o == Pause:
		return r.Time.check("pause_for")
	case o == Reserve && r.Time != nil && r.Time.Duration%time.Microsecond != 0:
		return Invalid("invalid max_wait", fmt.Sprintf("max_wait is %v.", r.Time.Duration), "Wait for whole microseconds, up to 365 days.")
	case o == Reserve:
		return r.Time.check("max_wait")
	}
	return nil
}

func (t *Time) check(argument string) *Error {
	switch {
	case t == nil:
		return missing(argument)
	case t.Text != "":
		return Invalid("invalid "+argument, fmt.Sprintf("%s is %s.", argument, t.Text), "Give at most 365 days.")
	}
	return nil
}

// options are Cost and IdempotencyKey, where they are given.
func (r Request) options() []client.CallOption {
	opts := named(r.IdempotencyKey)
	if r.Cost != nil {
		opts = append(opts, client.Cost(*r.Cost))
	}
	return opts
}

// named is the option of an idempotency key, if there is one.
func named(idempotencyKey *string) []client.CallOption {
	opts := make([]client.CallOption, 0, 2)
	if idempotencyKey != nil {
		opts = append(opts, client.IdempotencyKey(*idempotencyKey))
	}
	return opts
}

func (r Request) charge() client.Charge {
	c := client.Charge{Policy: cmp.Or(r.Policy, DefaultPolicy), Key: r.Key}
	if r.Cost != nil {
		c.Cost = client.Cost(*r.Cost)
	}
	return c
}

// maxShared is the longest text, in bytes, that the Combiner puts into a shared call.
const maxShared = 512

// canShare reports whether the request may travel in a call with others. A request with a text that is too long gets a connection
// of its own, and the error of the database.
func (r Request) canShare() bool {
	return len(r.Policy) <= maxShared && len(r.Key) <= maxShared && (r.IdempotencyKey == nil || len(*r.IdempotencyKey) <= maxShared)
}
