package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

func (p *program) apply() *cobra.Command {
	var c *cobra.Command
	c = policyfile.Command(func(ctx context.Context) (targets []policyfile.Target, err error) {
		dbs, err := p.connect(ctx, c.ErrOrStderr(), nil)
		for _, db := range dbs {
			target := policyfile.Target{Conn: db.Conn}
			if db.of > 0 {
				target.Name = db.String()
				target.Has = func(key string) bool { return client.ShardOf(key, db.of) == db.shard }
			}
			targets = append(targets, target)
		}
		return targets, err
	})
	c.Args = exactly(1)
	apply := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		err := apply(c, args)
		if errors.Is(err, policyfile.ErrDifference) {
			return answerNo{}
		}
		return err
	}
	return c
}
