package clienttest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

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
			held := db.model.Leases(id)[holder].Cost
			unit := "slots"
			if held == 1 {
				unit = "slot"
			}
			err = failure(err.Error(), "the holder holds with another cost",
				fmt.Sprintf("%s holds %d %s and is asked to hold %d.", quoted(holder), held, unit, cost))
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
	rows := []map[string]any{}
	for _, h := range db.model.Holders(now, given[string](policy), given[string](key)) {
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
		return failure("22023", "invalid policy", fmt.Sprintf("Policy %s has tokens, and lends no slots.", quoted(name)))
	}
	return nil
}

// checkTokensOf refuses a policy that has slots in place of buckets.
func (db *database) checkTokensOf(name string) error {
	if p, ok := db.model.Policy(name); ok && p.IsSlots() {
		return failure("22023", "invalid policy", fmt.Sprintf("Policy %s lends slots: it has a lease, and no tokens.", quoted(name)))
	}
	return nil
}

// checkHasBuckets refuses a policy that is not there, or has slots in place of buckets.
func (db *database) checkHasBuckets(name string) error {
	return cmp.Or(db.checkPolicy(name), db.checkTokensOf(name))
}
