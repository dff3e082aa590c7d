package service

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// An Operation is the kind of a call.
type Operation string

// The operations.
const (
	Acquire     Operation = "acquire"       // takes Cost tokens, or 1, from one bucket if it holds enough
	AcquireAll  Operation = "acquire_all"   // from several buckets of a shard if each holds enough
	AcquireMany Operation = "acquire_many"  // answers each request as Acquire; each is a Call
	AcquireUpTo Operation = "acquire_up_to" // takes as many as the bucket holds, between AtLeast, or 1, and Cost
	Reserve     Operation = "reserve"       // takes Cost tokens, or 1, if the bucket will have them within Time
	Charge      Operation = "charge"        // takes Cost tokens whatever the bucket holds
	Settle      Operation = "settle"        // replaces the cost of the grant that was made under IdempotencyKey by Cost
	SettleAll   Operation = "settle_all"    // does so for all buckets, of one shard, or for none
	Peek        Operation = "peek"          // decides as Acquire would, and takes nothing
	Refund      Operation = "refund"        // gives Cost tokens back
	Pause       Operation = "pause"         // stops the bucket for Time
	Hold        Operation = "hold"          // lends Cost slots, or 1, to Holder if they are free
	Renew       Operation = "renew"         // begins the lease of Holder anew, unless it does not hold
	Release     Operation = "release"       // frees the slots of Holder; Allowed if it held until now
	Gate        Operation = "gate"          // Envoy's ShouldRateLimit; one with negative hits is a Refund
)

// operationOf returns the operation of a path of JSON or a method of gRPC.
func operationOf(path string) Operation {
	name := path[strings.LastIndexByte(path, '/')+1:]
	for _, o := range []Operation{Acquire, AcquireAll, AcquireMany, AcquireUpTo, Reserve, Charge, Settle, SettleAll, Peek, Refund, Pause, Hold, Renew, Release} {
		if strings.EqualFold(name, string(o)) || strings.EqualFold(name, strings.ReplaceAll(string(o), "_", "")) {
			return o
		}
	}
	return cmp.Or(map[string]Operation{"json": Gate, "ShouldRateLimit": Gate, "AcquireStream": AcquireMany}[name], "_other")
}

func (o Operation) hasList() bool { return o == AcquireAll || o == AcquireMany || o == SettleAll }

// A Request is about one bucket, or those of List. The call decides which fields are obligatory.
type Request struct {
	Policy         string // DefaultPolicy if empty
	Key            string
	Cost           *int64
	IdempotencyKey *string
	Holder         string // of slots
	AtLeast        *int64 // of AcquireUpTo, which takes at most Cost
	Time           *Time  // the longest wait of Reserve; the length of a Pause
	List           []Request
}

// DefaultPolicy is the policy of a request without one.
const DefaultPolicy = "default"

func (r Request) policy() string { return cmp.Or(r.Policy, DefaultPolicy) }

// A Time is one that a caller gives.
type Time struct {
	time.Duration
	Text string // of one that is invalid or beyond MaxTime, in place of the Duration: as the caller wrote it
}

// MaxTime is beyond the 365 days that the database accepts, in seconds.
const MaxTime = 1e9

// MaxRequests of one call: as many as a request of AcquireAll has charges. They make four calls to the database.
const MaxRequests = 1000

// check returns the error of an argument that the client cannot send, or would name otherwise: null, too long, or less than a microsecond.
func (r Request) check(o Operation) *Error {
	n := len(r.List)
	switch {
	case o == AcquireMany && (n == 0 || n > MaxRequests):
		return Invalid("invalid requests", fmt.Sprintf("requests has %d elements.", n), fmt.Sprintf("Send 1 to %d requests in a call.", MaxRequests))
	case o == AcquireAll && n == 0:
		return missing("charges")
	case o == SettleAll && n == 0:
		return missing("settlements")
	case (o == Settle || o == SettleAll) && r.IdempotencyKey == nil:
		return missing("idempotency_key")
	case (o == Charge || o == Settle) && r.Cost == nil, o == SettleAll && slices.ContainsFunc(r.List, func(c Request) bool { return c.Cost == nil }):
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

func (r Request) cost() (cost client.CostOption) {
	if r.Cost != nil {
		cost = client.Cost(*r.Cost)
	}
	return cost
}

// maxShared is the longest text, in bytes, that the Combiner puts into a shared call.
const maxShared = 512

// canShare reports whether the call may travel with others. One with too long a text has its own connection, and the database's error.
func (r Request) canShare(o Operation) bool {
	return (o == Acquire || o == AcquireAll || o == AcquireMany) &&
		len(r.Policy) <= maxShared && len(r.Key) <= maxShared && (r.IdempotencyKey == nil || len(*r.IdempotencyKey) <= maxShared) &&
		!slices.ContainsFunc(r.List, func(c Request) bool { return !c.canShare(o) })
}
