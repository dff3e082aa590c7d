package clienttest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

const maxSlots = 10_000

// lend answers the functions of a holder.
func (db *database) lend(function string, now time.Time, id model.BucketID, args []any) ([]any, error) {
	holder, _ := args[2].(string)
	err := cmp.Or(checkBucket(id), checkName("holder", holder))
	var cost int64
	if function == "ratelimit_hold" {
		cost, _ = args[3].(int64)
		err = cmp.Or(err, checkPositive("cost", cost))
	}
	if err = cmp.Or(err, db.checkPolicy(id.Policy), db.checkLends(id.Policy)); err != nil {
		return nil, err
	}
	switch function {
	case "ratelimit_hold":
		d, err := db.model.Hold(now, id, holder, cost)
		if errors.Is(err, model.IdempotencyMismatch) {
			err = failure(err.Error(), "holder holds with another cost", fmt.Sprintf("%s holds with cost %d and asks for %d.",
				quoted(holder), db.model.Leases(id)[holder].Cost, cost))
		}
		return []any{d.Allowed, d.Remaining, wait(d.RetryAfter), int64(d.HeldFor), d.Capacity, d.Renewed, d.Shadowed}, err
	case "ratelimit_renew":
		heldFor, holds, err := db.model.Renew(now, id, holder)
		if !holds {
			heldFor = model.Never
		}
		return []any{wait(heldFor)}, err
	}
	held, err := db.model.Release(now, id, holder)
	return []any{held}, err
}

// holders lists as many as maxRows. A policy or a key that is nil is any.
func (db *database) holders(now time.Time, policy, key any, maxRows int64) string {
	text := func(arg any) *string {
		if s, ok := arg.(string); ok {
			return &s
		}
		return nil
	}
	rows := []map[string]any{}
	for _, h := range db.model.Holders(now, text(policy), text(key)) {
		if int64(len(rows)) == maxRows {
			break
		}
		rows = append(rows, map[string]any{"policy": h.Policy, "key": h.Key, "holder": h.Holder, "cost": h.Cost, "held_for": h.HeldFor})
	}
	list, _ := json.Marshal(rows)
	return string(list)
}

// checkLends refuses a policy that has no slots.
func (db *database) checkLends(name string) error {
	if p, ok := db.model.Policy(name); ok && !p.IsSlots() {
		return invalid("policy", name)
	}
	return nil
}

// checkHasBuckets refuses a policy that is not there, or has slots in place of buckets.
func (db *database) checkHasBuckets(name string) error {
	err := db.checkPolicy(name)
	if p, ok := db.model.Policy(name); err == nil && ok && p.IsSlots() {
		err = invalid("policy", name)
	}
	return err
}

// checkSlots refuses numbers that a policy with slots cannot have.
func checkSlots(n model.Numbers, leastCapacity int64) error {
	switch {
	case n.Refill != nil:
		return invalid("refill", *n.Refill)
	case n.Every != nil:
		return invalid("every", *n.Every)
	case n.Zone != nil:
		return invalid("time_zone", *n.Zone)
	case n.Anchor != nil:
		return invalid("anchor", *n.Anchor)
	case n.Capacity != nil && (*n.Capacity < leastCapacity || *n.Capacity > maxSlots):
		return invalid("capacity", *n.Capacity)
	}
	return checkLease(n)
}

func checkLease(n model.Numbers) error {
	if n.Lease != nil && *n.Lease < 1000 { // the client has none above the 1,000 years that are allowed
		return invalid("lease", *n.Lease)
	}
	return nil
}

// checkSlotsOf is checkSlots for the definition of a policy, which may exist.
func checkSlotsOf(def model.Definition, p model.Policy, exists bool) error {
	switch {
	case exists && !p.IsSlots():
		return invalid("lease", *def.Lease)
	case def.Period != nil:
		return invalid("period", *def.Period)
	case def.Stepped != nil:
		return invalid("stepped", *def.Stepped)
	case def.Remember != nil:
		return invalid("remember", *def.Remember)
	case !exists && def.Capacity == nil:
		return invalid("capacity", "null")
	}
	return checkSlots(def.Numbers, 1)
}
