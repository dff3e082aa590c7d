package main

import (
	"context"
	"math/rand/v2"
	"strconv"

	"golang.org/x/sync/errgroup"
)

// A keyspace is the keys that callers ask for, in a random order drawn beforehand: drawing costs no
// opponent anything, and all get the same.
type keyspace struct {
	keys  []string
	order []uint32
}

const manyKeys = 100_000

// keyspaces are the shapes of traffic by name.
func keyspaces() map[string]*keyspace {
	keys := make([]string, manyKeys)
	for i := range keys {
		keys[i] = keyName(userPrefix, i+1)
	}
	source := rand.New(rand.NewPCG(1, 2))
	return map[string]*keyspace{
		"uniform": {keys, order(func() uint32 { return source.Uint32N(manyKeys) })},
		"hot":     {[]string{hotKey}, []uint32{0}},
	}
}

const (
	hotKey             = "hot"
	userPrefix         = "user:"
	organisationPrefix = "organisation:"
)

// keyName is prefix || n in SQL.
func keyName(prefix string, n int) string { return prefix + strconv.Itoa(n) }

func order(next func() uint32) []uint32 {
	indexes := make([]uint32, 1<<20)
	for i := range indexes {
		indexes[i] = next()
	}
	return indexes
}

// from returns the keys that one of many callers asks for, one after another.
func (k *keyspace) from(caller int) func() string {
	i := caller * 7919 % len(k.order)
	return func() string {
		key := k.keys[k.order[i]]
		if i++; i == len(k.order) {
			i = 0
		}
		return key
	}
}

// askForAll lets every key be asked for once.
func (k *keyspace) askForAll(ctx context.Context, acquire acquirer) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(64)
	for _, key := range k.keys {
		group.Go(func() error { return acquire(ctx, key) })
	}
	return group.Wait()
}
