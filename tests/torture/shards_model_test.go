package torture

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Random calls of a client.Sharded, one after the other, get what the model of a single database answers.
func TestTorture_ShardsModel(t *testing.T) {
	pgtest.OncePerServer(t)
	run := kit.Torture(t, 10)
	s := kit.NewShards(t)
	s.Each(func(db *kit.TestDB) {
		db.SetTimeZone("Europe/Berlin")
		db.SetClock(kit.T0)
	})
	limiter := s.Limiter(nil)
	met := sightings{}
	run.Check(func(t *rapid.T) {
		m := newShardsModelRun(t, s, limiter, met)
		if met.lacks(toMeet) != "" {
			m.meetAll(t, m, s.Key(0, "x"), s.Key(0, "y"))
			m.sendApart(t, kit.WholeRequest{Charges: []model.Charge{
				{BucketID: model.BucketID{Policy: "d", Key: s.Key(0, "x")}}, {BucketID: model.BucketID{Policy: "d", Key: s.Key(1, "x")}},
			}})
			m.listPolicies(t)
			m.listOverrides(t)
			m = newShardsModelRun(t, s, limiter, met)
		}
		t.Repeat(m.actions())
		run.Progress("%d answers", met["answers that agree in every field"])
	})
	run.Figure("answers that agree in every field", met["answers that agree in every field"], "")
}

// A shardsModelRun makes every call twice, to a client.Sharded and to the model. It draws calls as a modelRun does.
type shardsModelRun struct {
	*modelRun
	s       *kit.Shards
	limiter *client.Sharded
	ctx     context.Context
}

func newShardsModelRun(t *rapid.T, s *kit.Shards, limiter *client.Sharded, met sightings) *shardsModelRun {
	s.Each(func(db *kit.TestDB) { db.Execute(emptyTables) })
	ctx := context.Background()
	m := &shardsModelRun{s: s, limiter: limiter, ctx: ctx, modelRun: &modelRun{
		model: model.New(), met: met, told: asDurations,
		clock: func(now time.Time) { s.Each(func(db *kit.TestDB) { db.SetClock(now) }) },
		ask:   func(of kit.Spending) (kit.Spent, error) { return of.With(ctx, limiter) },
		buckets: rapid.Custom(func(t *rapid.T) model.BucketID {
			id := bucketIDs.Draw(t, "bucket")
			id.Key = s.Key(rapid.IntRange(0, s.Of()-1).Draw(t, "shard"), id.Key)
			return id
		}),
	}}
	m.Begin(t, m)
	return m
}

func (m *shardsModelRun) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"acquire": func(t *rapid.T) { m.acquire(t, m.request(t)) },
		"again":   func(t *rapid.T) { m.acquire(t, m.earlier(t)) },
		"apart":   m.apart, "peek": m.peekOrRefund, "spend": m.spend, "spend now": m.spend, "settle": m.settle,
		"override": m.override, "clean up": m.cleanUp, "policies": m.changeOrList, "wait": m.wait, "step": m.step,
		"": func(t *rapid.T) {
			if m.now.Year() < 1000 || m.now.Year() > 8000 { // what RFC 3339 can say, with the longest override
				m.setClock(t, kit.T0)
			}
		},
	}
}

// asDurations is a decision with the longest times that the client can tell.
func asDurations(d kit.Decision) kit.Decision {
	for _, at := range []*model.Micros{&d.RetryAfter, &d.ResetAfter} {
		if *at != model.Never {
			*at = min(*at, math.MaxInt64/1000)
		}
	}
	return d
}

// acquire asks for what charges the first one's shard.
func (m *shardsModelRun) acquire(t *rapid.T, r kit.WholeRequest) {
	home := client.ShardOf(r.Charges[0].Key, m.s.Of())
	for i, c := range r.Charges {
		r.Charges[i].Key = m.s.Key(home, c.Key[:1])
	}
	m.sendOne(t, m.remembered(r))
}

func (m *shardsModelRun) sendOne(t *rapid.T, r kit.WholeRequest) {
	want, wantErr := m.model.AcquireAll(m.now, r.Charges, r.IdempotencyKey)
	var got kit.Whole
	var err error
	if len(r.Charges) == 1 && rapid.Bool().Draw(t, "alone") {
		var d client.Decision
		d, err = r.Single().By(m.ctx, m.limiter)
		got = kit.WholeOf(kit.DecisionOf(d))
	} else {
		got, err = r.By(m.ctx, m.limiter)
	}
	if m.sameError(t, wantErr, err); err == nil {
		m.sawWhole(r, want)
		want.Decision = asDurations(want.Decision)
		for i, d := range want.Decisions {
			want.Decisions[i] = asDurations(d)
		}
		require.Equal(t, want, got, "%+v", r)
	}
}

// apart asks for charges of several shards, which changes nothing.
func (m *shardsModelRun) apart(t *rapid.T) {
	r := m.request(t)
	homes := map[int]bool{}
	for _, c := range r.Charges {
		homes[client.ShardOf(c.Key, m.s.Of())] = true
	}
	if len(homes) < 2 {
		t.Skip("of one shard")
	}
	m.sendApart(t, r)
}

func (m *shardsModelRun) sendApart(t *rapid.T, r kit.WholeRequest) {
	require.ErrorIs(t, kit.ErrorOf(r.By(m.ctx, m.limiter)), client.ErrSeveralShards)
}

func (m *shardsModelRun) peekOrRefund(t *rapid.T) {
	id := m.buckets.Draw(t, "bucket")
	amount := m.amount(t, id.Policy)
	var want kit.Decision
	var got client.Decision
	var wantErr, err error
	if rapid.Bool().Draw(t, "peek") {
		want, wantErr = m.model.Peek(m.now, id, amount)
		got, err = m.limiter.Peek(m.ctx, id.Policy, id.Key, client.Cost(amount))
	} else {
		want, wantErr = m.model.Refund(m.now, id, amount)
		got, err = m.limiter.Refund(m.ctx, id.Policy, id.Key, amount)
	}
	m.same(t, asDurations(want), kit.DecisionOf(got), wantErr, err)
}

func (m *shardsModelRun) define(t *rapid.T, name string) {
	m.defineAs(t, name, definitions.Draw(t, "policy "+name))
}

func (m *shardsModelRun) defineAs(t *rapid.T, name string, def model.Definition) {
	atMost := func(length *model.Micros) time.Duration {
		if length == nil {
			return 0
		}
		*length = min(*length, math.MaxInt64/1000)
		return time.Duration(*length) * kit.Us
	}
	p := client.Policy{
		Name: name, Capacity: field(def.Capacity), Refill: field(def.Refill), Every: atMost(def.Every), Remember: atMost(def.Remember),
		Stepped: kit.ChoiceOf(def.Stepped), Durable: kit.ChoiceOf(def.Durable), Shadow: kit.ChoiceOf(def.Shadow),
	}
	err := m.limiter.DefinePolicy(m.ctx, p)
	m.sameError(t, m.model.Define(name, def), err)
}

// field is a number of a client.Policy or client.Override.
func field(n *int64) int64 {
	if n == nil {
		return 0
	}
	return cmp.Or(*n, client.Zero)
}

func (m *shardsModelRun) changeOrList(t *rapid.T) {
	id := m.buckets.Draw(t, "bucket")
	switch rapid.SampledFrom([]string{"define", "reset", "drop", "list"}).Draw(t, "what") {
	case "define":
		m.define(t, id.Policy)
	case "reset":
		m.sameError(t, m.model.Reset(id), m.limiter.Reset(m.ctx, id.Policy, id.Key))
	case "drop":
		m.sameError(t, m.model.Drop(id.Policy), m.limiter.DropPolicy(m.ctx, id.Policy))
		if !seldom.Draw(t, "leave it") {
			m.define(t, id.Policy)
		}
	case "list":
		m.listPolicies(t)
	}
}

func (m *shardsModelRun) listPolicies(t *rapid.T) {
	policies := kit.NoError(m.limiter.Policies(m.ctx))(t)
	want := m.model.Policies()
	require.Len(t, policies, len(want))
	for _, p := range policies {
		require.Equal(t, want[p.Name].Capacity, max(0, p.Capacity)) // client.Zero is below 0
		require.Equal(t, time.Duration(want[p.Name].Every)*kit.Us, p.Every)
	}
}

func (m *shardsModelRun) override(t *rapid.T) {
	id := m.buckets.Draw(t, "bucket")
	switch rapid.SampledFrom([]string{"set", "set", "set", "remove", "list"}).Draw(t, "what") {
	case "set":
		n := overridden.Draw(t, "numbers")
		var expires time.Time
		if rapid.Bool().Draw(t, "expires") {
			expires = model.Micros(rapid.Int64Range(-1, 1e9).Draw(t, "after")).After(m.now)
			m.instants = lastFew(append(m.instants, expires, expires.Add(model.CleanUpMargin)))
		}
		m.setOverride(t, id, n, expires)
	case "remove":
		had, err := m.limiter.RemoveOverride(m.ctx, id.Policy, id.Key)
		want, wantErr := m.model.RemoveOverride(m.now, id)
		if m.sameError(t, wantErr, err); err == nil {
			require.Equal(t, want, had)
		}
	case "list":
		if rapid.Bool().Draw(t, "of one key") {
			m.listOverrides(t, id.Key)
		} else {
			m.listOverrides(t)
		}
	}
}

// listOverrides compares those of keys, or all.
func (m *shardsModelRun) listOverrides(t *rapid.T, keys ...string) {
	var opts []client.CallOption
	for _, key := range keys {
		opts = append(opts, client.OfKey(key))
	}
	got := kit.NoError(m.limiter.Overrides(m.ctx, opts...))(t)
	want := map[model.BucketID]int64{}
	for at, o := range m.model.Overrides() {
		if o.Live(m.now) && (len(keys) == 0 || slices.Contains(keys, at.Key)) {
			want[at] = o.Capacity
		}
	}
	listed := map[model.BucketID]int64{}
	for _, o := range got {
		listed[model.BucketID{Policy: o.Policy, Key: o.Key}] = max(0, o.Capacity) // Zero is none
	}
	require.Equal(t, want, listed)
	m.saw("lists of overrides")
}

func (m *shardsModelRun) setOverride(t *rapid.T, id model.BucketID, n model.Numbers, expires time.Time) {
	o := client.Override{Policy: id.Policy, Key: id.Key, Capacity: field(n.Capacity), Refill: field(n.Refill), ExpiresAt: expires}
	if n.Every != nil {
		*n.Every = min(*n.Every, math.MaxInt64/1000)
		o.Every = time.Duration(*n.Every) * kit.Us
	}
	m.sameError(t, m.model.Override(m.now, id, n, expires), m.limiter.Override(m.ctx, o))
}

// cleanUp also compares which buckets have rows.
func (m *shardsModelRun) cleanUp(t *rapid.T) {
	require.NoError(t, kit.ErrorOf(m.limiter.Cleanup(m.ctx)))
	m.model.CleanUp(m.now)
	left := map[model.BucketID]bool{}
	m.s.Each(func(db *kit.TestDB) { maps.Copy(left, bucketsLeft(t, db.Pool)) })
	m.compareLeft(t, left)
}
