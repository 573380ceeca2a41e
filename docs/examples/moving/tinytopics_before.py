"""Topics of synthetic documents: how well they are found, and pictures of them."""

import tinytopics as tt

tt.set_random_seed(42)
X, true_L, true_F = tt.generate_synthetic_data(n=300, m=200, k=5, avg_doc_length=5000)

model, losses = tt.fit_model(X, k=5, num_epochs=200)
learned_L = model.get_normalized_L().numpy()
learned_F = model.get_normalized_F().numpy()

order = tt.align_topics(true_F, learned_F)
error = abs(learned_F[order] - true_F).sum() / 2 / 5
print(f"loss {losses[-1]:.1f}, {100 * error:.1f} % of the topics' mass is misplaced")

documents = tt.sort_documents(true_L)
tt.plot_loss(losses, dpi=80, output_file="loss.png")
tt.plot_structure(learned_L[:, order][documents], dpi=80, output_file="structure.png")
