package kit

import (
	"fmt"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/stretchr/testify/require"
)

type HoldDecision = model.HoldDecision

// Held is the answer to a hold that is granted anew.
func Held(remaining int64, heldFor time.Duration, capacity int64) HoldDecision {
	return HoldDecision{Allowed: true, Remaining: remaining, HeldFor: Micros(heldFor), Capacity: capacity}
}

// NotHeld is the answer to a hold that is denied.
func NotHeld(remaining int64, retryAfter time.Duration, capacity int64) HoldDecision {
	return HoldDecision{Remaining: remaining, RetryAfter: Micros(retryAfter), Capacity: capacity}
}

// Renewed is d to a holder that held.
func Renewed(d HoldDecision) HoldDecision {
	d.Renewed = true
	return d
}

func (db *TestDB) Lend(name string, capacity int64, lease time.Duration, opts ...PolicyOption) *TestDB {
	p := optionsOf(opts)
	db.Execute("select ratelimit_define_policy($1, $2, lease => $3, durable => $4)", name, capacity, Interval(lease), p.Durable)
	return db
}

// lent is a call about slots.
func lent(q Querier, function, policy, key, holder string, cost int64) (Answer, error) {
	return Spending{Function: function, BucketID: model.BucketID{Policy: policy, Key: key}, Holder: holder, Cost: cost}.Answer(q)
}

func Hold(q Querier, policy, key, holder string, cost int64) (HoldDecision, error) {
	a, err := lent(q, "hold", policy, key, holder, cost)
	if err != nil {
		return HoldDecision{}, err
	}
	d := a.Decision
	return HoldDecision{
		Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: d.RetryAfter, HeldFor: d.ResetAfter, Capacity: d.Capacity,
		Renewed: d.Replayed, Shadowed: d.Shadowed,
	}, nil
}

// Renew returns model.Never to a holder that does not hold.
func Renew(q Querier, policy, key, holder string) (model.Micros, error) {
	a, err := lent(q, "renew", policy, key, holder, 0)
	if err != nil || a.Rows[0] == "" {
		return model.Never, err
	}
	heldFor, err := strconv.ParseInt(a.Rows[0], 10, 64)
	return model.Micros(heldFor), err
}

func Release(q Querier, policy, key, holder string) (held bool, err error) {
	a, err := lent(q, "release", policy, key, holder, 0)
	return err == nil && a.Rows[0] == "t", err
}

// Hold, Renew and Release are calls about key k of policy p that must not fail.
func (db *TestDB) Hold(holder string, cost int64) HoldDecision {
	return NoError(Hold(db.Pool, "p", "k", holder, cost))(db.T)
}

func (db *TestDB) HoldAt(at time.Time, holder string, cost int64) HoldDecision {
	db.SetClock(at)
	return db.Hold(holder, cost)
}

func (db *TestDB) Renew(holder string) model.Micros {
	return NoError(Renew(db.Pool, "p", "k", holder))(db.T)
}

func (db *TestDB) Release(holder string) bool {
	return NoError(Release(db.Pool, "p", "k", holder))(db.T)
}

func (s *Session) Hold(holder string, cost int64) HoldDecision {
	return NoError(Hold(s, "p", "k", holder, cost))(s.Db.T)
}

// Holders are those of a policy as holder:cost, by key and end.
func (db *TestDB) Holders(policy string) []string {
	return Column(db.T, db.DB, "select format('%s:%s', holder, cost) from ratelimit_holders($1)", policy)
}

// StartHold, StartRenew and StartRelease make a call that may wait for other sessions. A Lent has what it answers.
func (s *Session) StartHold(holder string, cost int64) *Lent {
	return s.startLent(func(l *Lent) (err error) { l.HoldDecision, err = Hold(s, "p", "k", holder, cost); return err })
}

func (s *Session) StartRenew(holder string) *Lent {
	return s.startLent(func(l *Lent) (err error) { l.HeldFor, err = Renew(s, "p", "k", holder); return err })
}

func (s *Session) StartRelease(holder string) *Lent {
	return s.startLent(func(l *Lent) (err error) { l.Released, err = Release(s, "p", "k", holder); return err })
}

// A Lent is a call about slots under way in another goroutine.
type Lent struct {
	*Pending
	HoldDecision
	HeldFor  model.Micros
	Released bool
}

func (s *Session) startLent(call func(l *Lent) error) *Lent {
	l := new(Lent)
	l.Pending = s.Start(func(Querier) (Decision, error) { return Decision{}, call(l) })
	return l
}

// BlockedBy returns the call when it waits for a lock that the holder has.
func (l *Lent) BlockedBy(holder *Session) *Lent { l.Pending.BlockedBy(holder); return l }

// Over returns the call when it is over. The call must not have failed.
func (l *Lent) Over() *Lent {
	require.NoError(l.Session.Db.T, ErrorOf(l.Result()))
	return l
}

func (db *TestDB) LeaseRows() (rows []string) {
	for _, table := range SlotTables {
		rows = append(rows, Column(db.T, db.DB, fmt.Sprintf("select '%[1]s ' || ctid || xmin || t::text from ratelimit.%[1]s as t order by 1", table))...)
	}
	return rows
}
